"""`edge-controller lab bench routing` and `budget`: how good and how punctual decisions are."""

import json

import click

from controller.commands.target import WrongUsage, library_output_to_stderr
from controller.lab.bench import budget as budget_bench
from controller.lab.bench import routing as routing_bench
from controller.lab.tables import print_bench_rows, print_figures_table
from controller.routing.policies import UnknownPolicy


@click.command()
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
    known = {size.name: size for size in routing_bench.SIZES}
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise WrongUsage(f"no size {', '.join(unknown)}; there are: {', '.join(known)}")
    try:
        with library_output_to_stderr():
            rows = routing_bench.bench_routing(
                sizes=[known[name] for name in sizes] or routing_bench.SIZES,
                policies=policies or None,
                seeds=seeds,
                first_seed=first_seed,
                reference_seconds=reference_seconds,
                progress=lambda line: click.echo(line, err=True),
            )
    except UnknownPolicy as error:
        raise WrongUsage(str(error)) from error
    if as_json:
        click.echo(json.dumps({"rows": routing_bench.rows_as_json(rows)}))
    else:
        print_bench_rows(rows)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--decisions",
    type=click.IntRange(min=5),
    default=200,
    show_default=True,
    help="Number of decisions per size, queue and load.",
)
def budget(as_json: bool, decisions: int) -> None:
    """Measure how well `memetic` keeps its time budget on a busy machine."""
    rows = budget_bench.rows_as_json(
        budget_bench.bench_budget(
            decisions=decisions, progress=lambda line: click.echo(line, err=True)
        )
    )
    if as_json:
        click.echo(json.dumps({"rows": rows}))
    else:
        print_figures_table(rows)
