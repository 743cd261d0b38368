"""`edge-controller lab bench`: what parts of the controller cost and reach."""

import json
from pathlib import Path
from typing import Any

import click

from controller.commands.lazy import LazyGroup
from controller.commands.target import (
    CommandFailedError,
    WrongUsage,
    library_output_to_stderr,
    text,
)


@click.group(
    cls=LazyGroup,
    places={
        "simulator": "controller.lab.commands.experiment:bench_simulator_command",
        "drlm": "controller.lab.commands.fit:bench_drlm_command",
        "engine": "controller.lab.commands.fit:bench_engine_command",
    },
)
def bench() -> None:
    """Measure parts of the controller."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--size",
    "sizes",
    multiple=True,
    help="Problem size RxD, such as 30x88 (repeatable). Default: all nine.",
)
@click.option(
    "--policy", "policies", multiple=True, help="Run only this policy (repeatable). Default: all."
)
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--first-seed",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    help="First seed of the problems. Seeds below 1000 were used for tuning.",
)
@click.option(
    "--reference-seconds",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Time limit for the reference solution of each problem.",
)
def routing(
    as_json: bool,
    sizes: tuple[str, ...],
    policies: tuple[str, ...],
    seeds: int,
    first_seed: int,
    reference_seconds: float,
) -> None:
    """Measure every policy's J, its gap to the best known and to the bound, and its time."""
    from controller.lab.bench.routing import SIZES, bench_routing, rows_as_json
    from controller.lab.tables import print_bench_rows
    from controller.routing.policies import UnknownPolicy

    known = {size.name: size for size in SIZES}
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise WrongUsage(f"no size {', '.join(unknown)}; there are: {', '.join(known)}")
    try:
        with library_output_to_stderr():
            rows = bench_routing(
                sizes=[known[name] for name in sizes] or SIZES,
                policies=policies or None,
                seeds=seeds,
                first_seed=first_seed,
                reference_seconds=reference_seconds,
                progress=lambda line: click.echo(line, err=True),
            )
    except UnknownPolicy as error:
        raise WrongUsage(str(error)) from error
    if as_json:
        click.echo(json.dumps({"rows": rows_as_json(rows)}))
    else:
        print_bench_rows(rows)


@bench.command("budget")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--decisions",
    type=click.IntRange(min=5),
    default=200,
    show_default=True,
    help="Number of decisions per size, queue and load.",
)
def bench_budget_command(as_json: bool, decisions: int) -> None:
    """Measure how well `memetic` keeps its time budget on a busy machine."""
    from controller.lab.bench.budget import bench_budget, rows_as_json
    from controller.lab.tables import print_figures_table

    rows = rows_as_json(
        bench_budget(decisions=decisions, progress=lambda line: click.echo(line, err=True))
    )
    if as_json:
        click.echo(json.dumps({"rows": rows}))
    else:
        print_figures_table(rows)


@bench.command("embedding")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_embedding_command(as_json: bool) -> None:
    """Measure the embedding: time, memory, and agreement of int8 with float."""
    from controller.lab.bench.embedding import bench_embedding, report_as_json
    from controller.quality.embedding import EmbeddingUnavailableError

    try:
        report = bench_embedding(say=lambda line: click.echo(line, err=True))
    except EmbeddingUnavailableError as error:
        raise CommandFailedError(str(error)) from error
    _print_figures([report_as_json(report)], as_json)


@bench.command("store")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--prompts",
    "sizes",
    type=click.IntRange(min=100),
    multiple=True,
    help="Number of prompts in the store (repeatable). Default: 36,497 and 1,000,000.",
)
def bench_store_command(as_json: bool, sizes: tuple[int, ...]) -> None:
    """Measure look-ups in the quality store: time and recall."""
    from controller.lab.bench.store import SIZES, bench_store, rows_as_json

    rows = bench_store(sizes or SIZES, say=lambda line: click.echo(line, err=True))
    _print_figures(rows_as_json(rows), as_json)


@bench.command("predictions")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--rounds", type=click.IntRange(min=1), default=12, show_default=True)
@click.option(
    "--warm-up-rounds",
    type=click.IntRange(min=0),
    default=6,
    show_default=True,
    help="Number of bursts before the judged ones.",
)
@click.option(
    "--workload",
    "workloads",
    type=text,
    multiple=True,
    metavar="[FORMAT=]FILE",
    help="File with questions, as for `edge-controller lab profile run` (repeatable). Default:"
    " built-in ones.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=96,
    show_default=True,
    help="Maximum answer tokens of a question without a length of its own.",
)
@click.option("--policy", type=text, default="memetic", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("~/.cache/pointsman"),
    show_default=True,
    envvar="POINTSMAN_CACHE",
    help="Folder for model files and measured speeds.",
)
def bench_predictions_command(
    as_json: bool,
    rounds: int,
    warm_up_rounds: int,
    workloads: tuple[str, ...],
    max_tokens: int,
    policy: str,
    seed: int,
    cache: Path,
) -> None:
    """Compare predicted with real completion times on three agents with real models."""
    import asyncio

    from rich.console import Console

    from controller.client import ConnectError
    from controller.lab.bench.bursts import built_in_rounds, question_rounds
    from controller.lab.bench.predictions import bench_predictions, report_as_json
    from controller.lab.demo.errors import DemoError
    from controller.lab.offline.workloads import WorkloadError, named_workload, read_workload

    try:
        questions = [q for name in workloads for q in read_workload(*named_workload(name), seed)]
    except WorkloadError as error:
        raise CommandFailedError(str(error)) from error
    count = warm_up_rounds + rounds
    try:
        report, observations = asyncio.run(
            bench_predictions(
                cache.expanduser().absolute(),
                question_rounds(questions, count, seed, max_tokens)
                if questions
                else built_in_rounds(count, seed),
                warm_up_rounds,
                policy,
                Console(stderr=True, highlight=False),
                say=lambda line: click.echo(line, err=True),
            )
        )
    except (DemoError, ConnectError, ValueError) as error:
        raise CommandFailedError(str(error)) from error
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise click.Abort from None
    figures = report_as_json(report, observations)
    if not as_json:
        del figures["observations"]
    _print_figures([figures], as_json)


def _print_figures(rows: list[dict[str, Any]], as_json: bool) -> None:
    """One JSON object, or a line for each figure."""
    if as_json:
        click.echo(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}))
        return
    for row in rows:
        for key, value in row.items():
            click.echo(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")


@bench.command("events")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0),
    default=10.0,
    show_default=True,
    help="Seconds per rate.",
)
def bench_events_command(as_json: bool, seconds: float) -> None:
    """Measure how many events per second profiler and database take during decisions."""
    from controller.lab.bench.events import bench_events, rows_as_json
    from controller.lab.tables import print_figures_table

    rows = rows_as_json(bench_events(seconds))
    if as_json:
        click.echo(json.dumps({"rows": rows}))
    else:
        print_figures_table(rows)
