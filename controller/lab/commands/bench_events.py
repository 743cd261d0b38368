"""`edge-controller lab bench events`: what profiler and database take."""

import json

import click

from controller.lab.bench.events import bench_events, rows_as_json
from controller.lab.tables import print_figures_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0),
    default=10.0,
    show_default=True,
    help="Seconds per rate.",
)
def events(as_json: bool, seconds: float) -> None:
    """Measure how many events per second profiler and database take during decisions."""
    rows = rows_as_json(bench_events(seconds))
    if as_json:
        click.echo(json.dumps({"rows": rows}))
    else:
        print_figures_table(rows)
