"""How the results of `edge-agent models` and the progress of a pull look to people."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from edge_agent.models.commands import (
    ModelList,
    PulledModel,
    RemovedModel,
    Verification,
)
from edge_agent.models.progress import OnProgress, PullProgress, PullStage
from edge_agent.models.store import ModelPresence, in_megabytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_PLAIN_EVERY_SECONDS: Final = 5.0
_WIDE_COLUMNS: Final = 110
_STATE_STYLE: Final = {
    ModelPresence.INSTALLED: "green",
    ModelPresence.UNVERIFIED: "yellow",
    ModelPresence.PARTIAL: "yellow",
    ModelPresence.DAMAGED: "red",
    ModelPresence.ABSENT: "dim",
}


def render_list(result: ModelList, console: "Console") -> None:
    """Print the models as a table, and where they are."""
    from rich.markup import escape
    from rich.table import Table  # costs what `status --json` need not pay

    shows_licence = console.width >= _WIDE_COLUMNS
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MODEL", no_wrap=True)
    for name in ("PARAMS", "QUANT", "CONTEXT", "SIZE"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    if shows_licence:
        table.add_column("LICENCE", no_wrap=True)
    for model in result.models:
        share = model.on_disk_bytes / model.size_bytes if model.size_bytes else None
        is_partial = model.presence is ModelPresence.PARTIAL and share is not None
        state = f"partial {share:.0%}" if is_partial else model.presence.value
        style = _STATE_STYLE[model.presence]
        row = [
            model.name,
            f"{model.parameters_billions:.3g} B",
            model.quantisation,
            str(model.context_tokens),
            in_megabytes(model.size_bytes) if model.size_bytes else "made here",
            f"[{style}]{state}[/{style}]",
        ]
        table.add_row(*row, *([escape(model.licence)] if shows_licence else []))
    console.print(table)
    console.print(f"Folder: {result.folder}", style="dim", highlight=False, soft_wrap=True)


def render_pulled(result: PulledModel, console: "Console") -> None:
    """Print what was pulled, from where and to where."""
    done = "was installed already" if result.was_installed else f"took {result.seconds:.1f} s"
    console.print(
        f"{result.name}: {result.path} ({in_megabytes(result.size_bytes)}, {done})\n"
        f"  source  {result.source}\n  sha256  {result.sha256}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def render_verification(result: Verification, console: "Console") -> None:
    """Print one line a model, and what to do about those that are wrong."""
    if not result.models:
        console.print("No model is installed. Run `edge-agent models pull NAME`.", markup=False)
    for model in result.models:
        said = f"ok  {model.sha256}" if model.problem is None else f"wrong: {model.problem}"
        console.print(f"{model.name}: {said}", highlight=False, soft_wrap=True, markup=False)


def render_removed(result: RemovedModel, console: "Console") -> None:
    """Print how much was freed."""
    said = f"freed {in_megabytes(result.freed_bytes)}" if result.freed_bytes else "was not there"
    console.print(f"{result.name}: {said}", highlight=False, markup=False)


@contextmanager
def shown_progress(console: "Console") -> Iterator[OnProgress]:
    """Show a pull on the console while the block runs; yields what to give `pull_model`.

    A terminal gets a bar. Anything else gets a line a stage, and one every few seconds of a long
    stage, so that a log stays short and yet never looks dead.
    """
    if console.is_terminal:
        with _bar(console) as on_progress:
            yield on_progress
    else:
        yield _PlainLines(console)


@contextmanager
def _bar(console: "Console") -> Iterator[OnProgress]:
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        tasks: dict[str, TaskID] = {}
        stages: dict[str, PullStage] = {}

        def on_progress(progress: PullProgress) -> None:
            if progress.stage in (PullStage.SOURCE_FAILED, PullStage.RETRYING):
                shown.console.print(_line(progress), highlight=False, markup=False, soft_wrap=True)
                return
            if progress.model not in tasks:
                tasks[progress.model] = shown.add_task(progress.model, total=None)
            task = tasks[progress.model]
            if stages.get(progress.model) is not progress.stage:
                stages[progress.model] = progress.stage
                shown.reset(task, total=progress.total_bytes)
            detail = f" {progress.text}" if console.width >= _WIDE_COLUMNS else ""
            shown.update(
                task,
                description=escape(f"{progress.model}: {progress.stage.value}{detail}"),
                completed=progress.done_bytes,
                total=progress.total_bytes,
            )

        yield on_progress


class _PlainLines:
    """Prints a stage when it begins and every few seconds while it goes on."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._last: tuple[str, PullStage, str] | None = None
        self._printed_at = 0.0

    def __call__(self, progress: PullProgress) -> None:
        key = (progress.model, progress.stage, progress.text)
        now = time.monotonic()
        if key == self._last and now - self._printed_at < _PLAIN_EVERY_SECONDS:
            return
        self._last, self._printed_at = key, now
        self._console.print(_line(progress), highlight=False, markup=False, soft_wrap=True)


def _line(progress: PullProgress) -> str:
    amount = ""
    if progress.total_bytes:
        share = progress.done_bytes / progress.total_bytes
        amount = f" ({share:.0%} of {in_megabytes(progress.total_bytes)})"
    return f"{progress.model}: {progress.stage.value.replace('_', ' ')} {progress.text}{amount}"
