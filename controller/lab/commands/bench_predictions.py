"""`edge-controller lab bench predictions`: predicted against real completion times."""

import asyncio
from pathlib import Path

import click
from rich.console import Console

from controller.client import ConnectError
from controller.commands.target import CommandFailedError, text
from controller.lab.bench.bursts import built_in_rounds, question_rounds
from controller.lab.bench.predictions import bench_predictions, report_as_json
from controller.lab.demo.errors import DemoError
from controller.lab.offline.workloads import WorkloadError, named_workload, read_workload
from controller.lab.tables import print_figures


@click.command()
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
def predictions(
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
    print_figures([figures], as_json)
