"""Training the learned policies of an experiment, where none are given."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from controller.lab.simulator.cluster import ClusterDescription
from controller.lab.simulator.inputs import SimulationInputs

EPISODES: Final = {
    "ppo": 1000,
    "ppo-set": 960,
    "ppo-set-strangers": 960,
    "ppo-flat": 1000,
    "ppo-plain": 1000,
}
"""Of a whole training; DRLM's is 1000."""

QUICK_EPISODES: Final = {"ppo": 96, "ppo-set": 48}
"""Just enough to see that training works: such policies are not good."""


class TrainingMissing(RuntimeError):
    """Policies cannot be trained here; the text says what to install."""


def train_policies(
    cluster: ClusterDescription,
    inputs: SimulationInputs,
    folder: Path,
    episodes: dict[str, int],
    seed: int = 0,
    progress: Callable[[str, int, int, float], None] = lambda name, done, total, reward: None,
) -> None:
    """Train policies on the queries that are not held out, into folders of their names.

    A finished policy in the folder is kept; an interrupted training goes on from its checkpoint.

    Args:
        cluster: the fleet.
        inputs: its queries.
        folder: gets also `curve-NAME.csv` and `checkpoint-NAME.pt`.
        episodes: by policy.
        seed: of everything random.
        progress: called after each rollout with the policy, episodes done and in all, and the
            mean reward.

    Raises:
        TrainingMissing: torch is not installed.
        InputsError: the inputs do not fit the cluster.
        OSError: the folder cannot be written.
    """
    try:
        from controller.lab.training.export import export
        from controller.lab.training.ppo import Curve, Trainer, use_one_thread
        from controller.lab.training.recipes import recipe
        from controller.lab.training.scenario_world import world_of
        from controller.lab.training.worlds import strange_worlds
    except ImportError as error:
        raise TrainingMissing(
            f"training needs {error.name}; install the extra `train`, or give --artifacts"
        ) from error
    use_one_thread()
    worlds = [world_of(cluster, inputs)]
    for name, count in episodes.items():
        fleets = worlds
        if name == "ppo-set-strangers":
            fleets = strange_worlds()
        settings, traffic = recipe(name, count, seed)
        total = math.ceil(count / settings.environments) * settings.environments
        checkpoint = folder / f"checkpoint-{name}.pt"
        trainer = Trainer(fleets, settings, traffic)
        if checkpoint.exists():
            try:
                trainer.load(checkpoint)
            except (ValueError, RuntimeError):  # of other settings or another fleet: start anew
                trainer = Trainer(fleets, settings, traffic)
        if trainer.is_finished and (folder / name / "manifest.json").exists():
            continue

        def report(curve: Curve, name: str = name, total: int = total) -> None:
            progress(name, curve.episodes, total, curve.reward)

        trainer.train(report, checkpoint, folder / f"curve-{name}.csv")
        export(trainer, folder / name, "strangers" if fleets is not worlds else cluster.name)
