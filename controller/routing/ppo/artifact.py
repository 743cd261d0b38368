"""Files of learned policies: weights, what they expect, and where they come from.

A folder holds `manifest.json` and `weights.npz`. Plain arrays only, no pickles; the manifest has
the weights' SHA-256, so a torn or swapped file is refused.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.routing.ppo.observation import CANDIDATE_FEATURES, Float32Array, Layout

SCHEMA: Final = "pointsman.policy/1"
ARCHITECTURES: Final = ("factorised", "flat", "set")
_LAYOUT_ARRAYS: Final = (
    "model_keys",
    "node_keys",
    "kind_of_node",
    "choice_of_model",
    "level_of_model",
    "deployed",
)


class PolicyArtifactError(ValueError):
    """A learned policy cannot be read; the text says what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyArtifact:
    """A learned policy as it is served.

    Attributes:
        architecture: factorised, flat or set.
        weights: by the names of the trained network.
        lowest, highest: float32[inputs]; the range each input had in training.
        layout: the fleet it was trained on; None for `set`, which knows no names.
        provenance: settings and figures of the training.
    """

    architecture: str
    weights: Mapping[str, Float32Array]
    lowest: Float32Array
    highest: Float32Array
    layout: Layout | None
    provenance: Mapping[str, Any]


def write_artifact(artifact: PolicyArtifact, folder: Path) -> int:
    """Write the folder, each file at once; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {f"weights/{name}": value for name, value in artifact.weights.items()}
    arrays["lowest"], arrays["highest"] = artifact.lowest, artifact.highest
    if artifact.layout is not None:
        for name in _LAYOUT_ARRAYS:
            arrays[f"layout/{name}"] = getattr(artifact.layout, name)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    content = buffer.getvalue()
    manifest = {
        "schema": SCHEMA,
        "architecture": artifact.architecture,
        "weights_sha256": hashlib.sha256(content).hexdigest(),
        "candidate_features": list(CANDIDATE_FEATURES),
        "provenance": dict(artifact.provenance),
    }
    _replace(folder / "weights.npz", content)
    _replace(folder / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode())
    return len(content)


def read_artifact(folder: Path) -> PolicyArtifact:
    """Read a folder that `write_artifact` wrote.

    Raises:
        PolicyArtifactError: files are missing, torn, altered, or of another version.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        content = (folder / "weights.npz").read_bytes()
    except OSError as error:
        raise PolicyArtifactError(
            f"{error.filename}: cannot be read: {error.strerror}; name a folder that "
            "`edge-controller train` wrote"
        ) from error
    except ValueError as error:
        raise PolicyArtifactError(f"{folder}/manifest.json: not JSON; train again") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise PolicyArtifactError(f"{folder}: not of the form {SCHEMA}; train with this version")
    architecture = manifest.get("architecture")
    if architecture not in ARCHITECTURES:
        raise PolicyArtifactError(f"{folder}: unknown architecture {architecture!r}")
    if hashlib.sha256(content).hexdigest() != manifest.get("weights_sha256"):
        raise PolicyArtifactError(
            f"{folder}: weights.npz is not the file of this manifest; copy it again"
        )
    if architecture == "set" and manifest.get("candidate_features") != list(CANDIDATE_FEATURES):
        raise PolicyArtifactError(f"{folder}: was trained on other features; train again")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        layout = None
        if architecture != "set":
            layout = Layout(**{name: arrays[f"layout/{name}"] for name in _LAYOUT_ARRAYS})
        return PolicyArtifact(
            architecture,
            {
                name.removeprefix("weights/"): np.asarray(value, dtype=np.float32)
                for name, value in arrays.items()
                if name.startswith("weights/")
            },
            arrays["lowest"],
            arrays["highest"],
            layout,
            manifest.get("provenance", {}),
        )
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise PolicyArtifactError(f"{folder}: weights.npz lacks an array; train again") from error


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
