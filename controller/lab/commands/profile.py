"""Commands of offline profiling: questions to every destination, and what they show."""

import asyncio
import contextlib
import csv
import functools
import json
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from controller.client import Client, connected
from controller.commands.target import (
    CommandFailedError,
    Target,
    WrongUsage,
    asks_controller,
    call_controller,
    run_to_end,
    text,
)
from controller.lab.offline.fleet_view import DestinationsError, FleetView
from controller.lab.offline.journal import Failure, Journal, JournalError, Plan, read_journal
from controller.lab.offline.measurements import Measurement, MeasurementsError, write_measurements
from controller.lab.offline.outcome_import import ImportFailedError, import_outcomes
from controller.lab.offline.outcome_tables import OutcomeTableError, read_outcomes
from controller.lab.offline.profiling import ProfilingProgress, ProfilingRun, RunOutcome, plan_of
from controller.lab.offline.progress import RunProgress
from controller.lab.offline.question_sender import Sending, Teacher
from controller.lab.offline.questions import Part, Question, chosen, parted
from controller.lab.offline.recording import Recorder
from controller.lab.offline.report import Prediction, prediction, report, report_as_json
from controller.lab.offline.routed import batches_of, send_batches
from controller.lab.offline.summary import ROUTED, all_entries, run_folders, summarised
from controller.lab.offline.tables import print_report, print_summary
from controller.lab.offline.workloads import WorkloadError, named_workload, read_workload
from pointsman.v1 import admin_pb2

Result = TypeVar("Result")
Decorated = Callable[..., Any]
_FOLDER = click.Path(file_okay=False, path_type=Path)


class _Part(click.ParamType[Part]):
    """Such as 2/4."""

    name = "part"

    def convert(self, value: Any, param: Any, ctx: Any) -> Part:
        try:
            index, of = (int(number) for number in str(value).split("/"))
            return Part(index - 1, of)
        except ValueError:
            self.fail(f"{value!r} is no part such as 2/4", param, ctx)


@dataclass(frozen=True, slots=True)
class QuestionChoice:
    """Which questions are asked, and how; `_chooses_questions` has the options of these names."""

    workloads: tuple[str, ...]
    format: str = "auto"
    classes: tuple[str, ...] = ()
    sample: int | None = None
    limit: int | None = None
    parts: tuple[Part, ...] = ()
    seed: int = 0
    max_tokens: int = 256
    timeout: float = 900.0
    is_teaching: bool = True


def _chooses_questions(command: Decorated) -> Decorated:
    """Add the options that choose questions; the command gets them together as `choice`."""

    @functools.wraps(command)
    def run(*arguments: Any, **values: Any) -> Any:
        names = [entry.name for entry in fields(QuestionChoice)]
        choice = QuestionChoice(**{name: values.pop(name) for name in names})
        return command(*arguments, choice=choice, **values)

    wrapped: Decorated = run
    for option in reversed(
        (
            click.option(
                "--workload",
                "workloads",
                type=text,
                multiple=True,
                metavar="[FORMAT=]FILE",
                help="File with questions (repeatable): GSM8K, MMLU, MMLU-Pro, TruthfulQA or "
                "CommonsenseQA"
                " as published, or a JSONL of your own (docs/profiling-data.md).",
            ),
            click.option(
                "--format",
                "format",
                default="auto",
                show_default=True,
                help="Format of the files: gsm8k, mmlu, mmlu-pro, truthfulqa, "
                "truthfulqa-generation, "
                "commonsenseqa or jsonl.",
            ),
            click.option(
                "--classes",
                multiple=True,
                help="Ask only these classes, such as MMLU's subjects, separated by commas.",
            ),
            click.option(
                "--sample",
                type=click.IntRange(min=1),
                help="Number of random questions of each file.",
            ),
            click.option(
                "--limit",
                type=click.IntRange(min=1),
                help="Maximum number of questions of each file, from the first on.",
            ),
            click.option(
                "--part",
                "parts",
                type=_Part(),
                multiple=True,
                metavar="I/N",
                help="Ask every N-th question of each file, from the I-th on (repeatable), so "
                "that several"
                " fleets can share a set.",
            ),
            click.option(
                "--seed",
                type=click.IntRange(0, 2**32 - 1),
                default=0,
                show_default=True,
                help="Seed of samples, of the order of choices, and of the models' sampling.",
            ),
            click.option(
                "--max-tokens",
                type=click.IntRange(min=1),
                default=256,
                show_default=True,
                help="Maximum answer tokens of a question without a length of its own.",
            ),
            click.option(
                "--timeout",
                type=click.FloatRange(min=1),
                default=900.0,
                show_default=True,
                help="Maximum seconds for one answer.",
            ),
            click.option(
                "--teach/--no-teach",
                "is_teaching",
                default=True,
                show_default=True,
                help="Give the scores to the controller, which then routes by them.",
            ),
        )
    ):
        wrapped = option(wrapped)
    return wrapped


@click.group()
def profile() -> None:
    """Measure how well and how fast each destination answers question sets."""


@profile.command()
@_chooses_questions
@click.option("--node", "nodes", multiple=True, type=text, help="Ask only this node (repeatable).")
@click.option(
    "--model", "models", multiple=True, type=text, help="Ask only this model (repeatable)."
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Number of questions asked of one destination at once.",
)
@click.option(
    "--node-wait",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="Maximum seconds to wait for a lost node.",
)
@click.option("--resume", is_flag=True, help="Continue the run in --out.")
@click.option("--out", type=_FOLDER, required=True, help="Folder for the measurements.")
@asks_controller
def run(
    choice: QuestionChoice,
    nodes: tuple[str, ...],
    models: tuple[str, ...],
    concurrency: int,
    node_wait: float,
    resume: bool,
    out: Path,
    target: Target,
) -> None:
    """Ask every destination every question, grade the answers and record their costs.

    Greedy, with a fixed seed. It may be stopped at any time, and goes on with --resume.
    """
    files, questions = _questions(choice)
    sending = Sending(choice.max_tokens, choice.seed, choice.timeout, node_wait)
    plan = plan_of(files, questions, choice.max_tokens, choice.seed)
    outcome = _to_end(
        _profile_all(
            target,
            out,
            plan,
            resume,
            sending,
            choice.is_teaching,
            questions,
            nodes,
            models,
            concurrency,
        ),
        out,
    )
    try:
        summary = summarised(read_journal(out))
    except JournalError as error:
        raise CommandFailedError(str(error)) from error
    if target.as_json:
        body = {
            **asdict(outcome),
            "folder": str(out),
            "destinations": [asdict(row) for row in summary],
        }
        click.echo(json.dumps(body, indent=2, ensure_ascii=False))
    else:
        print_summary(summary, Console())
    _warn_of_refusal(outcome.refusal)
    if outcome.failed or outcome.left:
        raise CommandFailedError(
            f"{outcome.failed} questions failed and {outcome.left} were not asked; ask them again "
            "with --resume"
        )


async def _profile_all(
    target: Target,
    out: Path,
    plan: Plan,
    resume: bool,
    sending: Sending,
    is_teaching: bool,
    questions: Sequence[Question],
    nodes: Sequence[str],
    models: Sequence[str],
    concurrency: int,
) -> RunOutcome:
    async with _recording(target, out, plan, resume, sending, is_teaching) as (
        fleet,
        journal,
        teacher,
        recorder,
    ):
        targets = fleet.targets(nodes, models)
        with RunProgress(Console(stderr=True)) as shown:
            progress = ProfilingProgress(shown.started, shown.finished, shown.gone)
            run = ProfilingRun(recorder, fleet, journal, teacher, progress, concurrency)
            return await run.run(questions, targets)


@asynccontextmanager
async def _recording(
    target: Target, out: Path, plan: Plan, resume: bool, sending: Sending, is_teaching: bool
) -> AsyncIterator[tuple[FleetView, Journal, Teacher, Recorder]]:
    """Everything that a run needs, connected and open."""
    async with connected(target.connection) as client:
        fleet = FleetView(client)
        await fleet.refresh()
        fleet.targets((), ())  # nothing is begun while nobody is there
        with Journal(out, plan, resume) as journal:
            if journal.repaired_bytes:
                click.echo("A line that was cut off by a crash was taken away.", err=True)
            teacher = Teacher(client, is_teaching)
            yield fleet, journal, teacher, Recorder(client, fleet, journal, sending, teacher)


def _to_end(work: Any, out: Path) -> Any:
    """What the coroutine gives; Ctrl-C and SIGTERM end it with a word on how to go on."""
    stopped = False

    async def run() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            return await work
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    try:
        return run_to_end(run())
    except (DestinationsError, JournalError) as error:
        raise CommandFailedError(str(error)) from error
    except asyncio.CancelledError:
        if not stopped:
            raise
        raise CommandFailedError(
            f"stopped; what was measured is kept in {out}, and --resume goes on with it"
        ) from None


def _warn_of_refusal(refusal: str) -> None:
    if refusal:
        click.echo(f"The controller did not take all scores: {refusal}", err=True)


def _questions(choice: QuestionChoice) -> tuple[list[tuple[Path, str]], list[Question]]:
    """The files with their formats, and the questions that are chosen of them."""
    if not choice.workloads:
        raise click.UsageError("name at least one file of questions with --workload")
    wanted = {name.strip() for part in choice.classes for name in part.split(",") if name.strip()}
    known: set[str] = set()
    files: list[tuple[Path, str]] = []
    found: list[Question] = []
    for workload in choice.workloads:
        own = named_workload(workload, choice.format)
        try:
            questions = read_workload(own[0], own[1], choice.seed)
        except WorkloadError as error:
            raise WrongUsage(str(error)) from error
        known |= {question.question_class for question in questions}
        files.append(own)
        found += parted(
            chosen(questions, wanted, choice.sample, choice.seed)[: choice.limit], choice.parts
        )
    if wanted - known:
        raise WrongUsage(
            f"no class {', '.join(sorted(wanted - known))}; there are: {', '.join(sorted(known))}"
        )
    seen: set[tuple[str, str]] = set()
    for question in found:
        key = (question.workload, question.question_id)
        if key in seen:
            raise WrongUsage(
                f"{question.workload} {question.question_id!r} is in two of the files; profile "
                "them into folders of their own"
            )
        seen.add(key)
    return files, found


# -- batches that the policy routes ---------------------------------------------------------------


@profile.command()
@_chooses_questions
@click.option("--batches", type=click.IntRange(min=1), default=10, show_default=True)
@click.option(
    "--batch-size",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Number of requests sent at once.",
)
@click.option("--out", type=_FOLDER, required=True, help="Folder for the measurements.")
@asks_controller
def routed(
    choice: QuestionChoice,
    batches: int,
    batch_size: int,
    out: Path,
    target: Target,
) -> None:
    """Send batches by the policy in force, to compare predictions with measurements.

    One batch after the other; `profile report` shows the comparison.
    """
    files, questions = _questions(choice)
    if not questions:
        raise WrongUsage("no questions are left of the files")
    run_id = uuid.uuid4().hex[:12]
    folder = out / ROUTED / run_id
    made = batches_of(questions, batches, batch_size, choice.seed)
    recorder, refusal = _to_end(
        _route_all(
            target,
            folder,
            plan_of(files, questions, choice.max_tokens, choice.seed, run_id),
            Sending(choice.max_tokens, choice.seed, choice.timeout, 0.0),
            choice.is_teaching,
            made,
        ),
        folder,
    )
    try:
        _show_report(list(read_journal(folder)), target.as_json)
    except JournalError as error:
        raise CommandFailedError(str(error)) from error
    _warn_of_refusal(refusal)
    if recorder.failed:
        raise CommandFailedError(f"{recorder.failed} requests failed; the lines above say why")


async def _route_all(
    target: Target,
    folder: Path,
    plan: Plan,
    sending: Sending,
    is_teaching: bool,
    batches: Sequence[Sequence[Question]],
) -> tuple[Recorder, str]:
    async with _recording(target, folder, plan, False, sending, is_teaching) as (
        fleet,
        _,
        teacher,
        recorder,
    ):
        with RunProgress(Console(stderr=True)) as shown:
            shown.started(None, sum(len(batch) for batch in batches), 0)
            await send_batches(batches, recorder, fleet, lambda entry: shown.finished(None, entry))
        return recorder, teacher.refusal


# -- what was measured ----------------------------------------------------------------------------


@profile.command()
@click.argument("folder", type=_FOLDER)
@click.option(
    "--format",
    "format",
    type=click.Choice(["parquet", "csv"]),
    default="parquet",
    show_default=True,
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write. Default: FOLDER/measurements.parquet or .csv.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(folder: Path, format: Any, out: Path | None, as_json: bool) -> None:
    """Write the measurements in FOLDER as a table, and the failures as another.

    docs/profiling-data.md describes the columns.
    """
    path = out or folder / f"measurements.{format}"
    failures: list[Failure] = []

    def rows() -> Iterator[Measurement]:
        for entry in all_entries(folder):
            if isinstance(entry, Measurement):
                yield entry
            else:
                failures.append(entry)

    try:
        run_folders(folder)  # before anything is written
        count = write_measurements(path, rows(), format)
        failures_path = _write_failures(path.with_name("failures.csv"), failures)
    except (JournalError, MeasurementsError) as error:
        raise CommandFailedError(str(error)) from error
    except OSError as error:
        raise CommandFailedError(f"{path}: {error.strerror or error}") from error
    if as_json:
        body = {
            "file": str(path),
            "measurements": count,
            "failures": len(failures),
            "failures_file": str(failures_path) if failures_path else None,
        }
        click.echo(json.dumps(body))
    else:
        told = f", {len(failures)} failures in {failures_path}" if failures_path else ""
        click.echo(f"{path}: {count} measurements{told}")


def _write_failures(path: Path, failures: Sequence[Any]) -> Path | None:
    """Where they are; None, and no file of earlier, when there are none."""
    if not failures:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return None
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(failures[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(failure) for failure in failures)
    return path


@profile.command("report")
@click.argument("folder", type=_FOLDER, required=False)
@click.option("--live", is_flag=True, help="Judge the controller's latest answers, not a folder.")
@click.option(
    "--last",
    type=click.IntRange(1, 100_000),
    help="With --live: number of latest answers. Default: 10,000.",
)
@asks_controller
def report_command(folder: Path | None, live: bool, last: int | None, target: Target) -> None:
    """Compare predicted with measured finishes and joules in FOLDER. Shows quality, too.

    Predictions are judged by the batches of `profile routed`; where there are none, by the
    profiled questions. With --live they are those of everything that the controller has answered
    and still keeps, also before its last start.
    """
    if live == (folder is not None):
        raise click.UsageError("name a folder, or say --live")
    if last is not None and not live:
        raise click.UsageError("--last goes with --live")
    if folder is None:
        _show_live_report(last, target)
        return
    try:
        _show_report(list(all_entries(folder)), target.as_json)
    except JournalError as error:
        raise CommandFailedError(str(error)) from error


def _show_live_report(last: int | None, target: Target) -> None:
    async def call(client: Client) -> list[Prediction]:
        stream = client.admin.ListAccounts(
            admin_pb2.ListAccountsRequest(limit=last or 0), timeout=60
        )
        return [
            Prediction(
                response.account.node_id,
                response.account.model,
                response.account.batch_id,
                response.account.predicted_finish_seconds,
                response.account.measured_finish_seconds,
                response.account.predicted_energy_joules
                if response.account.HasField("predicted_energy_joules")
                else None,
                response.account.usage.energy_joules
                if response.account.usage.HasField("energy_joules")
                else None,
            )
            async for response in stream
        ]

    predictions = call_controller(target, call)
    found = report(predictions, ())
    if target.as_json:
        click.echo(json.dumps({"predictions_of": "live", "failed": None, **report_as_json(found)}))
    elif not predictions:
        raise CommandFailedError("the controller keeps no answered request")
    else:
        print_report(found, Console())


def _show_report(entries: Sequence[Any], as_json: bool) -> None:
    rows = [entry for entry in entries if isinstance(entry, Measurement)]
    kind = "routed" if any(row.kind == "routed" for row in rows) else "profiled"
    found = report([prediction(row) for row in rows if row.kind == kind], rows)
    failed = len(entries) - len(rows)
    if as_json:
        body = {"predictions_of": kind, "failed": failed, **report_as_json(found)}
        click.echo(json.dumps(body, indent=2, ensure_ascii=False))
        return
    if not rows:
        raise CommandFailedError("nothing has been answered yet; go on with --resume")
    print_report(found, Console())
    click.echo(f"Predictions of {kind} requests; {failed} questions failed.", err=True)


# -- outcome tables -------------------------------------------------------------------------------


@profile.command("import")
@click.argument("table", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--questions",
    "question_file",
    type=text,
    metavar="[FORMAT=]FILE",
    help="File with the questions of a table that has only their numbers.",
)
@click.option(
    "--rename",
    "renames",
    multiple=True,
    type=text,
    metavar="TABLE=MODEL",
    help="Name of a model in the table, and in the catalogue (repeatable).",
)
@click.option("--only-renamed", is_flag=True, help="Import only renamed models.")
@click.option(
    "--data-dir",
    type=_FOLDER,
    default=Path("~/.local/share/pointsman/controller"),
    show_default=True,
    help="Data folder of the controller. It must not be running.",
)
@click.option(
    "--embedding-dir",
    type=_FOLDER,
    help="Folder of the embedding model. Default: the cache folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_command(
    table: Path,
    question_file: str | None,
    renames: tuple[str, ...],
    only_renamed: bool,
    data_dir: Path,
    embedding_dir: Path | None,
    as_json: bool,
) -> None:
    """Import a published table of outcomes into the quality store. Runs no model.

    A model of the fleet profits from outcomes of the same name, on whatever node they were had.
    """
    questions = _questions(QuestionChoice((question_file,)))[1] if question_file else ()
    names = _renames(renames)
    try:
        outcomes, blank = read_outcomes(table, questions)
        unknown = sorted(set(names) - {outcome.model for outcome in outcomes})
        if unknown:
            raise WrongUsage(f"--rename: the table has no model {', '.join(unknown)}")
        taken = import_outcomes(
            [o for o in outcomes if not only_renamed or o.model in names],
            names,
            data_dir.expanduser(),
            embedding_dir,
            say=lambda line: click.echo(line, err=True),
        )
    except OutcomeTableError as error:
        raise WrongUsage(str(error)) from error
    except ImportFailedError as error:
        raise CommandFailedError(str(error)) from error
    if as_json:
        click.echo(json.dumps({**asdict(taken), "blank_cells": blank}))
    else:
        click.echo(
            f"{taken.outcomes} outcomes of {taken.prompts} prompts and {taken.models} models "
            f"are in the store now, which knows {taken.stored_prompts} prompts; {blank} cells of "
            "the table are blank"
        )


def _renames(renames: Sequence[str]) -> dict[str, str]:
    found = {}
    for rename in renames:
        before, is_pair, after = rename.rpartition("=")
        if not (is_pair and before and after):
            raise WrongUsage(f"--rename: TABLE=MODEL, not {rename!r}")
        found[before] = after
    return found
