"""Commands that run experiments."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from controller.commands.target import CommandFailedError, WrongUsage
from controller.lab.bench.simulator import simulator_figures
from controller.lab.commands.simulation_options import (
    FOLDER,
    GIVEN_FOLDER,
    Bars,
    Command,
    arrivals_option,
    inputs_option,
    jobs_option,
    lease_option,
    scenario_option,
    seed_option,
    simulation_errors_reported,
    trace_option,
    with_options,
)
from controller.lab.experiments.comparison_setting import settle
from controller.lab.experiments.condition_report import condition_tables, write_condition_report
from controller.lab.experiments.conditions import (
    ExperimentPlan,
    churn_plan,
    run_plan,
    seconds_plan,
    weights_plan,
)
from controller.lab.experiments.contenders import ALL
from controller.lab.experiments.drlm import QUICK, Design
from controller.lab.experiments.drlm_experiment import Study, conduct, usable_cores
from controller.lab.experiments.drlm_report import claims, loads
from controller.lab.experiments.figures import FiguresMissing
from controller.lab.experiments.learning import EPISODES, QUICK_EPISODES
from controller.lab.experiments.run_pool import FOLDER as PARTS
from controller.lab.experiments.runs import SimulatedLoad
from controller.lab.simulator.scenario_file import ScenarioError


@click.group()
def experiment() -> None:
    """Compare routing policies on a simulated cluster."""


@experiment.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Take at most a minute: two loads, two runs, hardly trained policies.",
)
@click.option(
    "--out",
    type=FOLDER,
    required=True,
    help="Folder for results.json, tables and figures. Given again, the run continues.",
)
@click.option(
    "--artifacts",
    type=GIVEN_FOLDER,
    help="Folder with `ppo`, `ppo-set` or both, written by `edge-controller lab train`. "
    "Default: they are trained first (extra `train`).",
)
@click.option(
    "--training-seed",
    "training_seeds",
    type=click.IntRange(min=0),
    multiple=True,
    help="Train the learned policies once more with this seed and compare the trainings "
    "(repeatable).",
)
@inputs_option
@scenario_option
@arrivals_option
@trace_option
@click.option(
    "--policy", "policies", multiple=True, help="Run only this policy (repeatable). Default: all."
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    multiple=True,
    help="Number of requests (repeatable). Default: 25, 50, 100.",
)
@click.option(
    "--rate", "rates", type=click.FloatRange(min=0, min_open=True), multiple=True,
    help="Arrivals per second (repeatable). Default: 0.5, 1, 2.",
)  # fmt: skip
@click.option("--runs", type=click.IntRange(min=1), help="Number of runs per load. Default: 10.")
@seed_option
@lease_option
@jobs_option
@click.option("--figures/--no-figures", default=True, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print rows and claims as one JSON object.")
def drlm(
    quick: bool,
    out: Path,
    artifacts: Path | None,
    training_seeds: tuple[int, ...],
    inputs: Path | None,
    scenario: str,
    arrivals: str,
    trace: Path | None,
    policies: tuple[str, ...],
    requests: tuple[int, ...],
    rates: tuple[float, ...],
    runs: int | None,
    seed: int,
    lease_seconds: float,
    jobs: int | None,
    figures: bool,
    as_json: bool,
) -> None:
    """Compare policies on DRLM's cluster, as its paper does."""
    known = [contender.label for contender in ALL]
    strange = [label for label in policies if label not in known]
    if strange:
        raise WrongUsage(f"no policy {', '.join(strange)}; there are: {', '.join(known)}")
    if seed in training_seeds or len(set(training_seeds)) < len(training_seeds):
        raise WrongUsage(
            f"--training-seed is for further ones; the first training has --seed {seed}"
        )
    base = QUICK if quick else Design()
    study = Study(
        out=out,
        contenders=[each for each in ALL if each.label in (policies or known)],
        design=Design(
            requests=requests or base.requests,
            rates=rates or base.rates,
            runs=runs or base.runs,
            seed=seed,
            arrivals=str(trace.absolute()) if trace else arrivals,
            unnoticed_seconds=lease_seconds,
        ),
        scenario=scenario,
        inputs=inputs,
        artifacts=artifacts,
        episodes=tuple((QUICK_EPISODES if quick else EPISODES).items()),
        training_seeds=training_seeds,
        jobs=jobs or (1 if quick else min(2, usable_cores())),
        has_figures=figures,
    )
    try:
        with simulation_errors_reported(out), Bars() as bars:
            results, written = conduct(study, bars.show)
    except FiguresMissing as error:
        raise CommandFailedError(f"{out}: tables are written, but {error}") from error
    if as_json:
        found = {
            "rows": [asdict(row) for row in results.rows],
            "targets": [asdict(target) for target in results.targets],
            "files": [str(path) for path in written],
        }
        click.echo(json.dumps(found))
        return
    click.echo(loads(results.rows))
    if results.targets:
        click.echo(claims(results.targets))
    for path in written:
        click.echo(str(path), err=True)


_of_conditions = with_options(
    click.option(
        "--artifacts",
        type=GIVEN_FOLDER,
        required=True,
        help="Folder of learned policies, written by `edge-controller lab train` or "
        "`lab experiment drlm`.",
    ),
    inputs_option,
    click.option(
        "--out",
        type=FOLDER,
        required=True,
        help="Folder for results.json, table.csv and tables.md. Given again, the run continues.",
    ),
    scenario_option,
    click.option("--runs", type=click.IntRange(min=1), default=10, show_default=True),
    seed_option,
    jobs_option,
)


def _load(requests: int, rate: float) -> Callable[[Command], Command]:
    """Options of what arrives, with these defaults."""
    return with_options(
        click.option("--requests", type=click.IntRange(min=1), default=requests, show_default=True),
        click.option(
            "--rate",
            type=click.FloatRange(min=0, min_open=True),
            default=rate,
            show_default=True,
            help="Arrivals per second.",
        ),
    )


@experiment.command()
@_of_conditions
@_load(200, 1.0)
def weights(requests: int, rate: float, **options: Any) -> None:
    """Raise the weights of energy and money, and compare how policies follow."""
    _compare_conditions(weights_plan(SimulatedLoad(requests, rate)), **options)


@experiment.command()
@_of_conditions
@_load(100, 2.0)
def seconds(requests: int, rate: float, **options: Any) -> None:
    """Raise the weight of time, and show which of DRLM's claims hold together."""
    _compare_conditions(seconds_plan(SimulatedLoad(requests, rate)), **options)


@experiment.command()
@_of_conditions
@_load(200, 1.0)
@lease_option
def churn(lease_seconds: float, requests: int, rate: float, **options: Any) -> None:
    """Let nodes fail and return at random, at rising rates."""
    _compare_conditions(churn_plan(SimulatedLoad(requests, rate), lease_seconds), **options)


def _compare_conditions(
    plan: ExperimentPlan,
    artifacts: Path,
    inputs: Path | None,
    out: Path,
    scenario: str,
    runs: int,
    seed: int,
    jobs: int | None,
) -> None:
    with simulation_errors_reported(out), Bars() as bars:
        results = run_plan(
            plan,
            settle(out, scenario, inputs, artifacts),
            range(seed, seed + runs),
            out / PARTS,
            jobs or min(2, usable_cores()),
            lambda done, total, what: bars.show(plan.name, done, total, what),
        )
        written = write_condition_report(results, out)
    click.echo(condition_tables(results))
    for path in written:
        click.echo(str(path), err=True)


@click.command("simulator")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--queries", type=click.IntRange(min=64), default=10_000, show_default=True)
@scenario_option
@seed_option
def bench_simulator_command(as_json: bool, queries: int, scenario: str, seed: int) -> None:
    """Measure how many queries a second the cluster simulator routes."""
    try:
        figures = simulator_figures(queries, scenario, seed)
    except ScenarioError as error:
        raise WrongUsage(str(error)) from error
    if as_json:
        click.echo(json.dumps(figures))
    else:
        for name, value in figures.items():
            click.echo(f"{name}: {value:.5g}" if isinstance(value, float) else f"{name}: {value}")
