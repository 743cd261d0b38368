"""Commands that train routing policies."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from controller.commands.asking import CommandFailedError, Wrong

if TYPE_CHECKING:
    from controller.training.ppo import Architecture, TrainingSettings
    from controller.training.vector_environment import Traffic, World


@click.group()
def train() -> None:
    """Train routing policies; needs the extra `train`."""


def _options(command: click.Command) -> click.Command:
    for option in reversed(
        (
            click.option(
                "--scenario",
                default=None,
                help="drlm or a TOML file of the simulator; or made up: strangers (ppo-set "
                "alone), stranger:SEED. drlm for ppo, strangers for ppo-set else.",
            ),
            click.option(
                "--inputs",
                type=click.Path(exists=True, file_okay=False, path_type=Path),
                help="Of the simulator's scenario, as `edge-controller fit --simulation-inputs` "
                "writes them; synthetic ones without.",
            ),
            click.option("--episodes", type=click.IntRange(min=1), default=1000, show_default=True),
            click.option(
                "--out",
                type=click.Path(file_okay=False, path_type=Path),
                required=True,
                help="Gets a folder with the policy's name, curve.csv and checkpoint.pt.",
            ),
            click.option("--resume", is_flag=True, help="Go on from the checkpoint there."),
            click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
        )
    ):
        option(command)
    return command


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
    help="DRLM as it is: without the one-step reward in the logits.",
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
    from controller.training.recipes import recipe

    if plain and architecture == "flat":
        raise Wrong("DRLM as it is has three heads; leave --plain or --architecture flat out")
    name = "ppo-plain" if plain else "ppo-flat" if architecture == "flat" else "ppo"
    _train("ppo", *recipe(name, episodes, seed), scenario or "drlm", inputs, out, resume)


@click.command("ppo-set")
def _ppo_set(
    scenario: str | None, inputs: Path | None, episodes: int, out: Path, resume: bool, seed: int
) -> None:
    """Train the policy that scores candidates, for any fleet."""
    from controller.training.recipes import recipe

    scenario = scenario or "strangers"
    name = "ppo-set-strangers" if scenario == "strangers" else "ppo-set"
    settings, traffic = recipe(name, episodes, seed)
    _train("ppo-set", settings, traffic, scenario, inputs, out, resume)


train.add_command(_options(_ppo))
train.add_command(_options(_ppo_set))


def _worlds(scenario: str, inputs: Path | None) -> "list[World]":
    """The fleets of a scenario; without the queries that policies are judged by."""
    from controller.simulator.inputs import InputsError, load_inputs, synthetic_inputs
    from controller.simulator.scenario_file import SHIPPED, ScenarioError, read_scenario
    from controller.training.scenario_world import world_of
    from controller.training.worlds import strange_world, strange_worlds

    if scenario in SHIPPED or scenario.endswith(".toml"):
        try:
            cluster = read_scenario(scenario)
            return [world_of(cluster, load_inputs(inputs) if inputs else synthetic_inputs(cluster))]
        except (ScenarioError, InputsError) as error:
            raise Wrong(str(error)) from error
    if inputs is not None:
        raise Wrong("--inputs are of a scenario of the simulator; give --scenario drlm, too")
    if scenario == "strangers":
        return strange_worlds()
    kind, _, seed = scenario.partition(":")
    if kind == "stranger" and seed.isdecimal():
        return [strange_world(int(seed)).split(0.2, 0)[0]]
    raise Wrong(
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
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from controller.storage.artifacts import ArtifactError
    from controller.training.export import export
    from controller.training.ppo import Curve, Trainer, use_one_thread

    use_one_thread()
    worlds = _worlds(scenario, inputs)
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists() and not resume:
        raise Wrong(f"{checkpoint} is there; give --resume to go on, or another --out")
    try:
        trainer = Trainer(worlds, settings, traffic)
        if resume:
            trainer.load(checkpoint)
    except FileNotFoundError as error:
        raise Wrong(f"{checkpoint}: nothing to go on from; leave --resume out") from error
    except ValueError as error:
        raise Wrong(str(error)) from error
    columns = (
        TextColumn("reward {task.fields[reward]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(
                "train", total=settings.episodes, reward="", completed=trainer.episodes
            )

            def report(curve: Curve) -> None:
                bar.update(task, completed=curve.episodes, reward=f"{curve.reward:.4f}")

            trainer.train(report, checkpoint, out / "curve.csv")
        size = export(trainer, out / name, scenario)
    except OSError as error:
        raise CommandFailedError(f"{out}: {error.strerror}") from error
    except ArtifactError as error:
        raise CommandFailedError(str(error)) from error
    click.echo(f"{out / name}: {size} bytes of weights, last reward {trainer.curve[-1].reward:.4f}")
