"""Commands that run experiments."""

import json
import time
from dataclasses import replace
from pathlib import Path

import click

from controller.commands.asking import CommandFailedError, Wrong


@click.group()
def experiment() -> None:
    """Compare routing policies; needs the extra `train`."""


@experiment.command()
@click.option("--quick", is_flag=True, help="25 requests at 1 a second, twice.")
@click.option(
    "--artifacts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with `ppo`, `ppo-set` or both, as `edge-controller train` writes them.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Gets results.json, table.csv, table.md and figures.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "bursts"]),
    default="poisson",
    show_default=True,
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay these arrivals instead: CSV or gzipped, in the form of Azure's LLM traces.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def drlm(
    quick: bool,
    artifacts: Path | None,
    out: Path,
    arrivals: str,
    trace: Path | None,
    seed: int,
) -> None:
    """Compare policies on DRLM's cluster, as its paper does."""
    from controller.experiments.drlm import (
        BASELINES,
        QUICK,
        SEARCHING,
        Design,
        compare,
        paper_names,
        paper_scenario,
        provenance,
        trained_contenders,
    )
    from controller.experiments.report import FiguresMissing, markdown, write_report
    from controller.routing.ppo.policy import use_artifacts
    from controller.simulator.workload import WorkloadError

    use_artifacts(str(artifacts) if artifacts else "")
    learned = trained_contenders()
    if artifacts is not None and not learned:
        raise Wrong(
            f"{artifacts}: holds neither a readable `ppo` nor a readable `ppo-set`; name the "
            "--out of `edge-controller train`"
        )
    contenders = (*BASELINES, *learned, *SEARCHING)
    design = replace(
        QUICK if quick else Design(), seed=seed, arrivals=str(trace) if trace else arrivals
    )
    started = time.perf_counter()
    try:
        rows = compare(
            paper_scenario(),
            contenders,
            design,
            paper_names(),
            progress=lambda line: click.echo(line, err=True),
        )
        made_with = provenance(design, contenders, time.perf_counter() - started)
        written = write_report(rows, made_with, out)
    except WorkloadError as error:
        raise Wrong(str(error)) from error
    except FiguresMissing as error:
        raise CommandFailedError(f"{out}: tables are written, but {error}") from error
    except OSError as error:
        raise CommandFailedError(f"{out}: {error.strerror}") from error
    click.echo(markdown(rows))
    for path in written:
        click.echo(str(path), err=True)


@click.command("simulator")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--queries", type=click.IntRange(min=64), default=10_000, show_default=True)
@click.option("--scenario", default="drlm", show_default=True, help="A name, or a TOML file.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def bench_simulator_command(as_json: bool, queries: int, scenario: str, seed: int) -> None:
    """Measure how many queries a second the cluster simulator routes."""
    from controller.bench.simulator import simulator_figures
    from controller.simulator.scenario_file import ScenarioError

    try:
        figures = simulator_figures(queries, scenario, seed)
    except ScenarioError as error:
        raise Wrong(str(error)) from error
    if as_json:
        click.echo(json.dumps(figures))
    else:
        for name, value in figures.items():
            click.echo(f"{name}: {value:.5g}" if isinstance(value, float) else f"{name}: {value}")
