"""How a run is going, on standard error: bars on a terminal, now and then a line elsewhere."""

import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from controller.lab.offline.fleet_view import ProfiledTarget
from controller.lab.offline.journal import Entry, Failure

_LINE_SECONDS: Final = 30.0
_ALL: Final = "all"


class RunProgress:
    """Shows what finishes; a context that ends the display.

    Args:
        console: where to, not standard output.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[scores]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            # Of the latest thousand questions, since those of other lengths are no guide.
            speed_estimate_period=600.0,
        )
        self._tasks: dict[str, TaskID] = {}
        self._scores: dict[str, list[float]] = {}
        self._total = self._before = self._done = self._failed = 0
        self._started_at = self._told_at = time.monotonic()

    def __enter__(self) -> "RunProgress":
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def started(self, target: ProfiledTarget | None, total: int, before: int) -> None:
        """A destination has so many questions, of which some were answered before."""
        self._total += total
        self._before += before
        self._done += before
        for name in (_ALL, str(target) if target else _ALL):
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=0, scores="")
        self._bars.update(self._tasks[_ALL], total=self._total, completed=self._done)
        if target is not None:
            self._bars.update(self._tasks[str(target)], total=total, completed=before)
            if not self._console.is_terminal:
                self._console.print(f"{target}: {total} questions, {before} answered before")

    def finished(self, target: ProfiledTarget | None, entry: Entry) -> None:
        """One question has come to its end."""
        self._done += 1
        if isinstance(entry, Failure):
            self._failed += 1
            self._console.print(
                f"{entry.workload} {entry.question_id!r} at {target or 'any'}: {entry.error}",
                style="yellow",
                markup=False,
                highlight=False,
            )
        for name in (_ALL, str(target) if target else _ALL):
            self._advance(name, entry)
            if target is None:
                break
        now = time.monotonic()
        if not self._console.is_terminal and now - self._told_at >= _LINE_SECONDS:
            self._told_at = now
            self._console.print(self._line(now), highlight=False)

    def gone(self, target: ProfiledTarget, left: int) -> None:
        """A destination went away and did not come back."""
        self._console.print(
            f"{target} is not ready any more; {left} questions are left. Go on with --resume.",
            style="yellow",
            markup=False,
            highlight=False,
        )

    def _advance(self, name: str, entry: Entry) -> None:
        scores = self._scores.setdefault(name, [])
        if not isinstance(entry, Failure) and entry.score_ratio is not None:
            scores.append(entry.score_ratio)
        told = f"score {sum(scores) / len(scores):.2f}" if scores else ""
        self._bars.update(self._tasks[name], advance=1, scores=told)

    def _line(self, now: float) -> str:
        rate = (self._done - self._before) / max(1e-9, now - self._started_at)
        remaining = (self._total - self._done) / rate if rate else 0.0
        return (
            f"{self._done} of {self._total} done, {self._failed} failed, about "
            f"{remaining / 60:.0f} min to go"
        )
