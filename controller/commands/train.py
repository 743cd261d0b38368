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
                help="paper, strangers (ppo-set alone), or stranger:SEED.",
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
    episodes: int,
    out: Path,
    resume: bool,
    seed: int,
) -> None:
    """Train DRLM's policy for one fleet."""
    from controller.training.ppo import TrainingSettings
    from controller.training.vector_environment import Traffic

    settings = TrainingSettings(
        architecture=architecture,
        episodes=episodes,
        seed=seed,
        reward_gain=0.0 if plain else 30.0,
        discount=0.95 if plain else 0.98,
        entropy=0.02 if plain else 0.003,
        waiting_weight=0.0 if plain else 0.01,
    )
    traffic = Traffic() if plain else Traffic(rates=(0.5, 3.0), down_ratio=0.1)
    _train("ppo", settings, traffic, scenario or "paper", out, resume)


@click.command("ppo-set")
def _ppo_set(scenario: str | None, episodes: int, out: Path, resume: bool, seed: int) -> None:
    """Train the policy that scores candidates, for any fleet."""
    from controller.training.ppo import TrainingSettings
    from controller.training.vector_environment import Traffic

    settings = TrainingSettings(
        architecture="set",
        episodes=episodes,
        environments=24,
        discount=0.98,
        entropy=0.003,
        learning_rate=1e-3,
        waiting_weight=0.01,
        reward_gain=60.0,
        seed=seed,
    )
    traffic = Traffic(rates=(0.5, 3.0), preferences=0.3, down_ratio=0.2)
    _train("ppo-set", settings, traffic, scenario or "strangers", out, resume)


train.add_command(_options(_ppo))
train.add_command(_options(_ppo_set))


def _worlds(scenario: str) -> "list[World]":
    """The fleets of a scenario; of `paper` and `stranger:SEED` the queries to train on alone."""
    from controller.training.worlds import paper_world, strange_world

    if scenario == "paper":
        return [paper_world(0).split(0.2, 0)[0]]
    if scenario == "strangers":
        return [*(strange_world(seed) for seed in range(100, 105)), paper_world(7, 600)]
    kind, _, seed = scenario.partition(":")
    if kind == "stranger" and seed.isdecimal():
        return [strange_world(int(seed)).split(0.2, 0)[0]]
    raise Wrong(f"no scenario {scenario!r}; there are: paper, strangers, stranger:SEED")


def _train(
    name: str,
    settings: "TrainingSettings",
    traffic: "Traffic",
    scenario: str,
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

    from controller.training.export import export
    from controller.training.ppo import Curve, Trainer, use_one_thread

    use_one_thread()
    worlds = _worlds(scenario)
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

            trainer.train(report, checkpoint)
        trainer.write_curve(out / "curve.csv")
        size = export(trainer, out / name, scenario)
    except OSError as error:
        raise CommandFailedError(f"{out}: {error.strerror}") from error
    click.echo(f"{out / name}: {size} bytes of weights, last reward {trainer.curve[-1].reward:.4f}")
