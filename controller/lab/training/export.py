"""From a finished training run to the folder that a controller serves."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from controller.lab.training.ppo import Trainer
from controller.request_manager.policy_files import save_policy
from controller.routing.ppo.artifact import PolicyArtifact


def artifact_of(trainer: Trainer, scenario: str) -> PolicyArtifact:
    """The trained policy without what only training needs.

    Args:
        trainer: at least one rollout done.
        scenario: what it was trained on, for the manifest.

    Raises:
        ValueError: nothing was trained yet.
    """
    if trainer.lowest is None or trainer.highest is None or not trainer.curve:
        raise ValueError("nothing is trained yet; run at least one rollout")
    weights = {
        name: np.asarray(value.detach().numpy(), dtype=np.float32)
        for name, value in trainer.network.state_dict().items()
        if not name.startswith("critic")
    }
    provenance: dict[str, Any] = {
        "scenario": scenario,
        "settings": asdict(trainer.settings),
        "episodes": trainer.episodes,
        "last_reward": trainer.curve[-1].reward,
    }
    layout = None if trainer.settings.architecture == "set" else trainer.layout
    return PolicyArtifact(
        trainer.settings.architecture,
        weights,
        np.asarray(trainer.lowest, dtype=np.float32),
        np.asarray(trainer.highest, dtype=np.float32),
        layout,
        provenance,
    )


def export(trainer: Trainer, folder: Path, scenario: str) -> int:
    """Write the policy; returns the bytes of its weights.

    Raises:
        ValueError: nothing was trained yet.
        ArtifactError: the folder cannot be written.
    """
    artifact = artifact_of(trainer, scenario)
    save_policy(folder, artifact)
    return sum(values.nbytes for values in artifact.weights.values())
