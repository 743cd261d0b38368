"""Commands that train routing policies."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from controller.commands.target import WrongUsage
from controller.lab.commands.simulation_options import (
    FOLDER,
    Bars,
    inputs_option,
    seed_option,
    simulation_errors_reported,
    with_options,
)

if TYPE_CHECKING:
    from controller.lab.training.ppo import Architecture, TrainingSettings
    from controller.lab.training.vector_environment import Traffic, World


@click.group()
def train() -> None:
    """Train routing policies (extra `train`)."""


_options = with_options(
    click.option(
        "--scenario",
        default=None,
        help="Fleet to train on: `drlm`, a scenario file, or generated (`strangers`, ppo-set only;"
        " `stranger:SEED`). Default: drlm for ppo, strangers for ppo-set.",
    ),
    inputs_option,
    click.option("--episodes", type=click.IntRange(min=1), default=1000, show_default=True),
    click.option(
        "--out",
        type=FOLDER,
        required=True,
        help="Folder for the policy, curve.csv and checkpoint.pt.",
    ),
    click.option("--resume", is_flag=True, help="Continue from the checkpoint in --out."),
    seed_option,
)


@click.command("ppo")
@click.option(
    "--architecture",
    type=click.Choice(["factorised", "flat"]),
    default="factorised",
    show_default=True,
)
@click.option(
    "--plain",
    is_flag=True,
    help="Train as in the DRLM paper, without the one-step reward in the logits.",
)
def _ppo(
    architecture: "Architecture",
    plain: bool,
    scenario: str | None,
    inputs: Path | None,
    episodes: int,
    out: Path,
    resume: bool,
    seed: int,
) -> None:
    """Train DRLM's policy for one fleet."""
    from controller.lab.training.recipes import recipe

    if plain and architecture == "flat":
        raise WrongUsage("DRLM as it is has three heads; leave --plain or --architecture flat out")
    name = "ppo-plain" if plain else "ppo-flat" if architecture == "flat" else "ppo"
    _train("ppo", *recipe(name, episodes, seed), scenario or "drlm", inputs, out, resume)


@click.command("ppo-set")
def _ppo_set(
    scenario: str | None, inputs: Path | None, episodes: int, out: Path, resume: bool, seed: int
) -> None:
    """Train the policy that scores candidates, for any fleet."""
    from controller.lab.training.recipes import recipe

    scenario = scenario or "strangers"
    name = "ppo-set-strangers" if scenario == "strangers" else "ppo-set"
    settings, traffic = recipe(name, episodes, seed)
    _train("ppo-set", settings, traffic, scenario, inputs, out, resume)


train.add_command(_options(_ppo))
train.add_command(_options(_ppo_set))


def _worlds(scenario: str, inputs: Path | None) -> "list[World]":
    """The fleets of a scenario; without the queries that policies are judged by."""
    from controller.lab.simulator.inputs import inputs_for
    from controller.lab.simulator.scenario_file import SHIPPED, read_scenario
    from controller.lab.training.scenario_world import world_of
    from controller.lab.training.worlds import strange_world, strange_worlds

    if scenario in SHIPPED or scenario.endswith(".toml"):
        with simulation_errors_reported():
            cluster = read_scenario(scenario)
            return [world_of(cluster, inputs_for(cluster, inputs))]
    if inputs is not None:
        raise WrongUsage("--inputs are of a scenario of the simulator; give --scenario drlm, too")
    if scenario == "strangers":
        return strange_worlds()
    kind, _, seed = scenario.partition(":")
    if kind == "stranger" and seed.isdecimal():
        return [strange_world(int(seed)).split(0.2, 0)[0]]
    raise WrongUsage(
        f"no scenario {scenario!r}; there are: {', '.join(SHIPPED)}, a TOML file, "
        "strangers, stranger:SEED"
    )


def _train(
    name: str,
    settings: "TrainingSettings",
    traffic: "Traffic",
    scenario: str,
    inputs: Path | None,
    out: Path,
    resume: bool,
) -> None:
    from controller.lab.training.export import export
    from controller.lab.training.ppo import Curve, Trainer, use_one_thread

    use_one_thread()
    worlds = _worlds(scenario, inputs)
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists() and not resume:
        raise WrongUsage(f"{checkpoint} is there; give --resume to go on, or another --out")
    try:
        trainer = Trainer(worlds, settings, traffic)
        if resume:
            trainer.load(checkpoint)
    except FileNotFoundError as error:
        raise WrongUsage(f"{checkpoint}: nothing to go on from; leave --resume out") from error
    except ValueError as error:
        raise WrongUsage(str(error)) from error
    with simulation_errors_reported(out), Bars() as bars:

        def report(curve: Curve) -> None:
            bars.show("train", curve.episodes, settings.episodes, f"reward {curve.reward:.4f}")

        trainer.train(report, checkpoint, out / "curve.csv")
        size = export(trainer, out / name, scenario)
    click.echo(f"{out / name}: {size} bytes of weights, last reward {trainer.curve[-1].reward:.4f}")
