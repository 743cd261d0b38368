"""A policy on a simulated cluster: what would become of these requests."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from controller.commands.target import CommandFailedError, WrongUsage, text
from controller.lab.commands.simulation_options import (
    GIVEN_FOLDER,
    arrivals_option,
    inputs_option,
    lease_option,
    scenario_option,
    seed_option,
    simulation_errors_reported,
    trace_option,
)
from controller.lab.experiments.contenders import LEARNED_POLICIES, Contender, trained
from controller.lab.experiments.runs import Circumstances, SimulatedLoad, mean_figures, run_all
from controller.lab.simulator.inputs import held_out_scenario, inputs_for
from controller.lab.simulator.runner import SimulatedWindow, outages_of
from controller.lab.simulator.scenario_file import read_scenario
from controller.routing.policies import BrokenPolicy, UnknownPolicy, warm_up
from controller.routing.problem import ProblemError


@click.command()
@click.option("--policy", type=text, default="memetic", show_default=True)
@scenario_option
@inputs_option
@click.option("--artifacts", type=GIVEN_FOLDER, help="Folder of learned policies.")
@click.option("--requests", type=click.IntRange(min=1), default=100, show_default=True)
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
    help="Arrivals per second.",
)  # fmt: skip
@arrivals_option
@trace_option
@click.option(
    "--window-seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Window in which arrivals are gathered. 0: each is decided alone.",
)
@click.option("--window-most", type=click.IntRange(min=1), default=30, show_default=True)
@lease_option
@click.option("--runs", type=click.IntRange(min=1), default=1, show_default=True)
@seed_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with a row per run.")
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
    """Simulate a policy on a cluster. Nodes may fail and join."""
    contender = Contender(policy, policy, SimulatedWindow(window_seconds, window_most))
    load = SimulatedLoad(requests, rate, str(trace) if trace else arrivals)
    if not trained([contender], artifacts):
        raise WrongUsage(
            f"{policy} has to be trained first: `edge-controller lab train {policy} --scenario "
            f"{scenario} --out FOLDER`, then --artifacts FOLDER"
        )
    try:
        with simulation_errors_reported():
            if policy not in LEARNED_POLICIES:
                warm_up([policy])
            cluster = read_scenario(scenario)
            found = run_all(
                held_out_scenario(cluster, inputs_for(cluster, inputs)),
                contender,
                load,
                range(seed, seed + runs),
                Circumstances(outages=tuple(outages_of(cluster.events, lease_seconds))),
                artifacts,
            )
    except (UnknownPolicy, ProblemError) as error:
        raise WrongUsage(str(error)) from error
    except BrokenPolicy as error:
        raise CommandFailedError(str(error)) from error
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
