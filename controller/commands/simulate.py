"""A policy on a simulated cluster: what would become of these requests."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from controller.commands.asking import CommandFailedError, Wrong, text


@click.command()
@click.option("--policy", type=text, default="memetic", show_default=True)
@click.option("--scenario", default="drlm", show_default=True, help="A name, or a TOML file.")
@click.option(
    "--inputs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="As `edge-controller fit --simulation-inputs` writes them; synthetic ones without.",
)
@click.option(
    "--artifacts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of learned policies.",
)
@click.option("--requests", type=click.IntRange(min=1), default=100, show_default=True)
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
    help="Arrivals a second.",
)  # fmt: skip
@click.option(
    "--arrivals", type=click.Choice(["poisson", "bursts"]), default="poisson", show_default=True
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay these arrivals at the rate: in the form of Azure's LLM traces.",
)
@click.option(
    "--window-seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="How long arrivals are gathered; 0 decides on each by itself.",
)
@click.option("--window-most", type=click.IntRange(min=1), default=30, show_default=True)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="How long a node of the scenario that fails goes on being sent requests.",
)
@click.option("--runs", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, a run a row.")
def simulate(
    policy: str,
    scenario: str,
    inputs: Path | None,
    artifacts: Path | None,
    requests: int,
    rate: float,
    arrivals: str,
    trace: Path | None,
    window_seconds: float,
    window_most: int,
    lease_seconds: float,
    runs: int,
    seed: int,
    as_json: bool,
) -> None:
    """Simulate a policy on a cluster described in a file, nodes that fail and join included."""
    from controller.experiments.contenders import LEARNED_POLICIES, Contender, trained
    from controller.experiments.runs import Circumstances, Load, mean_figures, run_all
    from controller.routing.policies import BrokenPolicy, UnknownPolicy, warm_up
    from controller.routing.problem import ProblemError
    from controller.simulator.inputs import (
        InputsError,
        load_inputs,
        scenario_of,
        synthetic_inputs,
    )
    from controller.simulator.runner import Window, outages_of
    from controller.simulator.scenario_file import ScenarioError, read_scenario
    from controller.simulator.workload import WorkloadError

    contender = Contender(policy, policy, Window(window_seconds, window_most))
    load = Load(requests, rate, str(trace) if trace else arrivals)
    if not trained([contender], artifacts):
        raise Wrong(
            f"{policy} has to be trained first: `edge-controller train {policy} --scenario "
            f"{scenario} --out FOLDER`, then --artifacts FOLDER"
        )
    try:
        if policy not in LEARNED_POLICIES:
            warm_up([policy])
        cluster = read_scenario(scenario)
        given = load_inputs(inputs) if inputs else synthetic_inputs(cluster)
        found = run_all(
            scenario_of(cluster, given.part(given.is_held_out)),
            contender,
            load,
            range(seed, seed + runs),
            Circumstances(outages=tuple(outages_of(cluster.events, lease_seconds))),
            artifacts,
        )
    except (ScenarioError, InputsError, WorkloadError, UnknownPolicy, ProblemError) as error:
        raise Wrong(str(error)) from error
    except BrokenPolicy as error:
        raise CommandFailedError(str(error)) from error
    except OSError as error:
        raise CommandFailedError(f"{error.filename}: {error.strerror}") from error
    if as_json:
        names = [model.name for model in cluster.configurations]
        groups = [group.name for group in cluster.groups]
        click.echo(
            json.dumps(
                {
                    "policy": policy,
                    "scenario": cluster.name,
                    "configurations": names,
                    "groups": groups,
                    "runs": [asdict(run) for run in found],
                }
            )
        )
        return
    for name, value in mean_figures(found).items():
        click.echo(f"{name}: {value:.4g}")
