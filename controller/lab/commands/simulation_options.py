"""What the commands on simulated clusters share: options, progress bars, how errors are told."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from controller.commands.target import CommandFailedError, WrongUsage
from controller.lab.experiments.conditions import NothingLearned
from controller.lab.experiments.learning import TrainingMissing
from controller.lab.experiments.run_pool import ExperimentError
from controller.lab.simulator.inputs import InputsError
from controller.lab.simulator.scenario_file import ScenarioError
from controller.lab.simulator.workload import TrafficError
from controller.storage.artifacts import ArtifactError

Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER = click.Path(file_okay=False, path_type=Path)
GIVEN_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

scenario_option = click.option(
    "--scenario",
    default="drlm",
    show_default=True,
    help="Name of a packaged scenario, or a TOML file.",
)
inputs_option = click.option(
    "--inputs",
    type=GIVEN_FOLDER,
    help="Folder with queries, predictions and truth of the scenario, written by "
    "`edge-controller lab fit --simulation-inputs`. Default: synthetic ones.",
)
seed_option = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
jobs_option = click.option(
    "--jobs", type=click.IntRange(min=1), help="Number of processes. Default: at most 2."
)
lease_option = click.option(
    "--lease-seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Time until a failed node is noticed.",
)
arrivals_option = click.option(
    "--arrivals", type=click.Choice(["poisson", "bursts"]), default="poisson", show_default=True
)
trace_option = click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with arrivals to replay at the rate: CSV or gzipped, in the form of Azure's LLM"
    " traces.",
)


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """All of them on one command, listed by its help in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@contextlib.contextmanager
def simulation_errors_reported(out: Path | None = None) -> Iterator[None]:
    """Tell what a simulation cannot be done with as wrong usage, and the rest as a failure.

    Args:
        out: named where a file fails that has no name.
    """
    try:
        yield
    except (ScenarioError, InputsError, TrafficError, NothingLearned) as error:
        raise WrongUsage(str(error)) from error
    except (ArtifactError, ExperimentError, TrainingMissing) as error:
        raise CommandFailedError(str(error)) from error
    except OSError as error:
        raise CommandFailedError(f"{error.filename or out}: {error.strerror}") from error


class Bars:
    """Progress of each stage on standard error; nothing where that is no terminal."""

    def __enter__(self) -> "Bars":
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
        """Say how far a stage is; it gets a bar of its own."""
        if stage not in self._tasks:
            self._tasks[stage] = int(self._bars.add_task(stage, total=total, what=what))
        task = TaskID(self._tasks[stage])
        self._bars.update(task, completed=done, total=total, what=what)
