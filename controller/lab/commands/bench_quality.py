"""`edge-controller lab bench embedding` and `store`: prompts embedded and looked up."""

import click

from controller.commands.target import CommandFailedError
from controller.lab.bench.embedding import bench_embedding, report_as_json
from controller.lab.bench.store import SIZES, bench_store, rows_as_json
from controller.lab.tables import print_figures
from controller.quality.embedding import EmbeddingUnavailableError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def embedding(as_json: bool) -> None:
    """Measure the embedding: time, memory, and agreement of int8 with float."""
    try:
        report = bench_embedding(say=lambda line: click.echo(line, err=True))
    except EmbeddingUnavailableError as error:
        raise CommandFailedError(str(error)) from error
    print_figures([report_as_json(report)], as_json)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--prompts",
    "sizes",
    type=click.IntRange(min=100),
    multiple=True,
    help="Number of prompts in the store (repeatable). Default: 36,497 and 1,000,000.",
)
def store(as_json: bool, sizes: tuple[int, ...]) -> None:
    """Measure look-ups in the quality store: time and recall."""
    rows = bench_store(sizes or SIZES, say=lambda line: click.echo(line, err=True))
    print_figures(rows_as_json(rows), as_json)
