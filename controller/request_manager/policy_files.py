"""Learned policies as artifact folders."""

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.routing.ppo.artifact import FindArtifact, NoArtifact, PolicyArtifact, no_artifact
from controller.routing.ppo.observation import CANDIDATE_FEATURES, Layout
from controller.storage.artifacts import Artifact, ArtifactError, load_artifact, save_artifact

KIND: Final = "routing-policy"

_WEIGHTS: Final = "weights."
_LAYOUT: Final = "layout."


def save_policy(folder: Path, artifact: PolicyArtifact) -> None:
    """Write an artifact folder; one that is there is replaced as a whole.

    Raises:
        ArtifactError: it cannot be written.
    """
    arrays: dict[str, Any] = {_WEIGHTS + name: value for name, value in artifact.weights.items()}
    arrays["lowest"], arrays["highest"] = artifact.lowest, artifact.highest
    if artifact.layout is not None:
        for part in fields(artifact.layout):
            arrays[_LAYOUT + part.name] = getattr(artifact.layout, part.name)
    details = {
        "architecture": artifact.architecture,
        "candidate_features": list(CANDIDATE_FEATURES),
    }
    save_artifact(folder, Artifact(KIND, arrays, {}, details, artifact.provenance))


def load_policy(folder: Path) -> PolicyArtifact:
    """The policy of an artifact folder, its hashes checked.

    Raises:
        ArtifactError: the folder is absent, altered, of another schema or kind, or inconsistent.
    """
    found = load_artifact(folder, KIND)
    try:
        architecture = str(found.details["architecture"])
        if architecture == "set" and found.details["candidate_features"] != list(
            CANDIDATE_FEATURES
        ):
            raise ArtifactError(f"{folder} was trained on other features; train it again")
        layout = None
        if architecture != "set":
            layout = Layout(
                **{part.name: found.arrays[_LAYOUT + part.name] for part in fields(Layout)}
            )
        return PolicyArtifact(
            architecture,
            {
                name.removeprefix(_WEIGHTS): np.asarray(value, dtype=np.float32)
                for name, value in found.arrays.items()
                if name.startswith(_WEIGHTS)
            },
            found.arrays["lowest"],
            found.arrays["highest"],
            layout,
            found.provenance,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder} is inconsistent ({error}); train it again") from error


def policies_in(folder: Path | None) -> FindArtifact:
    """Finds learned policies in the folders of their names, read again at each call.

    Args:
        folder: None holds none.
    """
    if folder is None:
        return no_artifact

    def find(name: str) -> PolicyArtifact | NoArtifact:
        try:
            return load_policy(folder / name)
        except ArtifactError as error:
            return NoArtifact(str(error))

    return find
