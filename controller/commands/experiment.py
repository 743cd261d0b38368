"""Commands that run experiments."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from controller.commands.asking import CommandFailedError, Wrong

if TYPE_CHECKING:
    from controller.experiments.conditions import Plan


@click.group()
def experiment() -> None:
    """Compare routing policies on a simulated cluster."""


@experiment.command()
@click.option(
    "--quick",
    is_flag=True,
    help="At most a minute: two loads, two runs, and policies that are hardly trained.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Gets results.json, tables and figures; given again, goes on where it was stopped.",
)
@click.option(
    "--artifacts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with `ppo`, `ppo-set` or both, as `edge-controller train` writes them; without "
    "it they are trained first, which needs the extra `train`.",
)
@click.option(
    "--inputs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Queries with predictions and truth, as `edge-controller fit --simulation-inputs` writes "
    "them; synthetic ones without.",
)
@click.option("--scenario", default="drlm", show_default=True, help="A name, or a TOML file.")
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
@click.option(
    "--policy", "policies", multiple=True, help="Only this label; may be given again. All else."
)
@click.option("--requests", type=click.IntRange(min=1), multiple=True, help="25, 50, 100 else.")
@click.option(
    "--rate", "rates", type=click.FloatRange(min=0, min_open=True), multiple=True,
    help="Arrivals a second; 0.5, 1, 2 else.",
)  # fmt: skip
@click.option("--runs", type=click.IntRange(min=1), help="Of each load; 10 else.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="How long a node of the scenario that fails goes on being sent requests.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; 2 at most else.")
@click.option("--figures/--no-figures", default=True, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print rows and claims as one JSON object.")
def drlm(
    quick: bool,
    out: Path,
    artifacts: Path | None,
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
    from dataclasses import asdict

    from controller.experiments.contenders import ALL
    from controller.experiments.drlm import QUICK, Design, ExperimentError
    from controller.experiments.figures import FiguresMissing
    from controller.experiments.learning import EPISODES, QUICK_EPISODES, TrainingMissing
    from controller.experiments.report import claims, loads
    from controller.experiments.study import Study, conduct, usable_cores
    from controller.simulator.inputs import InputsError
    from controller.simulator.scenario_file import ScenarioError
    from controller.simulator.workload import WorkloadError

    known = [contender.label for contender in ALL]
    strange = [label for label in policies if label not in known]
    if strange:
        raise Wrong(f"no policy {', '.join(strange)}; there are: {', '.join(known)}")
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
        jobs=jobs or (1 if quick else min(2, usable_cores())),
        has_figures=figures,
    )
    try:
        with _Bars() as bars:
            results, written = conduct(study, bars.show)
    except (ScenarioError, InputsError, WorkloadError) as error:
        raise Wrong(str(error)) from error
    except FiguresMissing as error:
        raise CommandFailedError(f"{out}: tables are written, but {error}") from error
    except (ExperimentError, TrainingMissing) as error:
        raise CommandFailedError(str(error)) from error
    except OSError as error:
        raise CommandFailedError(f"{error.filename or out}: {error.strerror}") from error
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


def _of_conditions(command: click.Command) -> click.Command:
    """What the experiments on conditions have in common."""
    for option in reversed(
        (
            click.option(
                "--artifacts",
                type=click.Path(exists=True, file_okay=False, path_type=Path),
                required=True,
                help="Folder of learned policies, as `edge-controller train` or `experiment drlm` "
                "writes them.",
            ),
            click.option(
                "--inputs",
                type=click.Path(exists=True, file_okay=False, path_type=Path),
                help="As `edge-controller fit --simulation-inputs` writes them; synthetic ones "
                "without.",
            ),
            click.option(
                "--out",
                type=click.Path(file_okay=False, path_type=Path),
                required=True,
                help="Gets results.json, table.csv and tables.md.",
            ),
            click.option("--scenario", default="drlm", show_default=True),
            click.option("--requests", type=click.IntRange(min=1), default=200, show_default=True),
            click.option(
                "--rate",
                type=click.FloatRange(min=0, min_open=True),
                default=1.0,
                show_default=True,
                help="Arrivals a second.",
            ),
            click.option("--runs", type=click.IntRange(min=1), default=10, show_default=True),
            click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
        )
    ):
        option(command)
    return command


@click.command()
def weights(requests: int, rate: float, **options: Any) -> None:
    """Put more and more weight on energy and on money, and see who heeds it."""
    from controller.experiments.conditions import weights_plan
    from controller.experiments.runs import Load

    _compare_conditions(weights_plan(Load(requests, rate)), **options)


@click.command()
@click.option(
    "--lease-seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="How long a node that fails goes on being sent requests.",
)
def churn(lease_seconds: float, requests: int, rate: float, **options: Any) -> None:
    """Let nodes fail and come back at random, more and more often."""
    from controller.experiments.conditions import churn_plan
    from controller.experiments.runs import Load

    _compare_conditions(churn_plan(Load(requests, rate), lease_seconds), **options)


experiment.add_command(_of_conditions(weights))
experiment.add_command(_of_conditions(churn))


def _compare_conditions(
    plan: "Plan",
    artifacts: Path,
    inputs: Path | None,
    out: Path,
    scenario: str,
    runs: int,
    seed: int,
) -> None:
    from controller.experiments.condition_report import condition_tables, write_condition_report
    from controller.experiments.conditions import NothingLearned, run_plan
    from controller.experiments.origin import origin_of
    from controller.simulator.inputs import (
        InputsError,
        load_inputs,
        scenario_of,
        synthetic_inputs,
    )
    from controller.simulator.scenario_file import ScenarioError, read_scenario

    try:
        cluster = read_scenario(scenario)
        given = load_inputs(inputs) if inputs else synthetic_inputs(cluster)
        judged = scenario_of(cluster, given.part(given.is_held_out))
        with _Bars() as bars:
            results = run_plan(
                plan,
                judged,
                range(seed, seed + runs),
                artifacts,
                origin_of(cluster, given),
                lambda done, total, what: bars.show(plan.name, done, total, what),
            )
        written = write_condition_report(results, out)
    except (ScenarioError, InputsError, NothingLearned) as error:
        raise Wrong(str(error)) from error
    except OSError as error:
        raise CommandFailedError(f"{error.filename or out}: {error.strerror}") from error
    click.echo(condition_tables(results))
    for path in written:
        click.echo(str(path), err=True)


class _Bars:
    """Progress of each stage on standard error; nothing where that is no terminal."""

    def __enter__(self) -> "_Bars":
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[what]}"),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, int] = {}
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, stage: str, done: int, total: int, what: str) -> None:
        from rich.progress import TaskID

        if stage not in self._tasks:
            self._tasks[stage] = int(self._bars.add_task(stage, total=total, what=what))
        task = TaskID(self._tasks[stage])
        self._bars.update(task, completed=done, total=total, what=what)


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
