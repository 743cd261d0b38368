"""How each policy is trained: settings that were found to work, and why."""

from typing import Final

from controller.lab.training.ppo import TrainingSettings
from controller.lab.training.vector_environment import Traffic

PREFERENCES: Final = 0.3
"""Share of a set policy's episodes with weights drawn at random."""

NAMES: Final = ("ppo", "ppo-set", "ppo-set-strangers", "ppo-flat", "ppo-plain")


def recipe(name: str, episodes: int, seed: int) -> tuple[TrainingSettings, Traffic]:
    """Settings and traffic for a policy.

    `ppo-plain` is DRLM's, with its paper's hyperparameters. The others start at the greedy policy
    and stay near it where it is sure (`reward_gain`): a second of wait is worth some 0.0002 of
    DRLM's reward, which a softer start drowns in its own noise. The wait's own weight makes the
    queue felt; small rollouts and a wide bound on their divergence let the policy move far enough
    in a thousand episodes. Set policies also see other weights than DRLM's, so that they follow
    those that they are served with.

    Args:
        name: one of `NAMES`.
        episodes: in all.
        seed: of everything random.

    Raises:
        ValueError: there is no such policy.
    """
    if name not in NAMES:
        raise ValueError(f"no recipe for {name}; there are: {', '.join(NAMES)}")
    if name == "ppo-plain":
        return TrainingSettings(episodes=episodes, reward_gain=0.0, seed=seed), Traffic()
    is_set, is_general = name.startswith("ppo-set"), name == "ppo-set-strangers"
    settings = TrainingSettings(
        architecture="set" if is_set else "flat" if name == "ppo-flat" else "factorised",
        episodes=episodes,
        environments=12 if is_general else 8,
        learning_rate=1e-3 if is_set else 5e-4,
        discount=0.95,
        entropy=0.001,
        target_divergence=0.1,
        waiting_weight=0.05 if is_set else 0.02,
        reward_gain=2000.0 if is_set else 3000.0,
        seed=seed,
    )
    preferences = PREFERENCES if is_set else 0.0
    return settings, Traffic(rates=(0.5, 3.0), preferences=preferences, down_ratio=0.1)
