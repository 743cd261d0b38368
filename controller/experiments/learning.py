"""Training the learned policies of an experiment, where none are given."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from controller.simulator.cluster import ClusterDescription
from controller.simulator.inputs import SimulationInputs

if TYPE_CHECKING:
    from controller.training.ppo import TrainingSettings
    from controller.training.vector_environment import Traffic

EPISODES: Final = {"ppo": 1000, "ppo-set": 640}
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
    """Train `ppo` and `ppo-set` on the queries that are not held out, into folders of these names.

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
        from controller.training.export import export
        from controller.training.ppo import Curve, Trainer, use_one_thread
        from controller.training.scenario_world import world_of
    except ImportError as error:
        raise TrainingMissing(
            f"training needs {error.name}; install the extra `train`, or give --artifacts"
        ) from error
    use_one_thread()
    world = world_of(cluster, inputs)
    for name, count in episodes.items():
        settings, traffic = _settings(name, count, seed)
        total = math.ceil(count / settings.environments) * settings.environments
        checkpoint = folder / f"checkpoint-{name}.pt"
        trainer = Trainer([world], settings, traffic)
        if checkpoint.exists():
            try:
                trainer.load(checkpoint)
            except (ValueError, RuntimeError):  # of other settings or another fleet: start anew
                trainer = Trainer([world], settings, traffic)
        if trainer.is_finished and (folder / name / "manifest.json").exists():
            continue

        def report(curve: Curve, name: str = name, total: int = total) -> None:
            progress(name, curve.episodes, total, curve.reward)

        trainer.train(report, checkpoint)
        trainer.write_curve(folder / f"curve-{name}.csv")
        export(trainer, folder / name, cluster.name)


def _settings(name: str, episodes: int, seed: int) -> "tuple[TrainingSettings, Traffic]":
    """What `edge-controller train` takes, for one fleet and DRLM's reward."""
    from controller.training.ppo import TrainingSettings
    from controller.training.vector_environment import Traffic

    traffic = Traffic(rates=(0.5, 3.0), down_ratio=0.1)
    if name == "ppo-set":
        return (
            TrainingSettings(
                architecture="set",
                episodes=episodes,
                environments=16,
                discount=0.98,
                entropy=0.003,
                learning_rate=1e-3,
                waiting_weight=0.01,
                reward_gain=60.0,
                seed=seed,
            ),
            traffic,
        )
    return (
        TrainingSettings(
            architecture="factorised",
            episodes=episodes,
            reward_gain=30.0,
            discount=0.98,
            entropy=0.003,
            waiting_weight=0.01,
            seed=seed,
        ),
        traffic,
    )
