"""A learned policy as it is served: weights, what they expect, and where they come from.

`controller.request_manager.policy_files` reads and writes it.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

import numpy as np

from controller.routing.ppo.observation import (
    CANDIDATE_FEATURES,
    Float32Array,
    Layout,
    vector_size,
)

ARCHITECTURES: Final = ("factorised", "flat", "set")

_FIRST_LAYERS: Final = {
    "factorised": "encoder.0.weight",
    "flat": "encoder.0.weight",
    "set": "candidate.0.weight",
}


@dataclass(frozen=True, slots=True, eq=False)
class PolicyArtifact:
    """A learned policy.

    Attributes:
        architecture: factorised, flat or set.
        weights: by the names of the trained network.
        lowest, highest: float32[inputs]; the range each input had in training.
        layout: the fleet it was trained on; None for `set`, which knows no names.
        provenance: settings and figures of the training.

    Raises:
        ValueError: the parts do not fit each other, or a weight is not finite.
    """

    architecture: str
    weights: Mapping[str, Float32Array]
    lowest: Float32Array
    highest: Float32Array
    layout: Layout | None
    provenance: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"there is no architecture {self.architecture!r}")
        if (self.layout is None) != (self.architecture == "set"):
            raise ValueError(f"a {self.architecture} policy with the wrong kind of layout")
        inputs = len(CANDIDATE_FEATURES) if self.layout is None else vector_size(self.layout)
        first = self.weights.get(_FIRST_LAYERS[self.architecture])
        if first is None or first.ndim != 2 or first.shape[1] != inputs:
            raise ValueError(f"the first layer does not take the {inputs} inputs there are")
        if self.lowest.shape != (inputs,) or self.highest.shape != (inputs,):
            raise ValueError(f"the trained range is not one of {inputs} inputs")
        for name, values in self.weights.items():
            if not np.isfinite(values).all():
                raise ValueError(f"{name} is not finite")

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of all that decisions depend on."""
        found = hashlib.sha256(self.architecture.encode())
        arrays: dict[str, Any] = {**self.weights, "lowest": self.lowest, "highest": self.highest}
        if self.layout is not None:
            arrays |= {part.name: getattr(self.layout, part.name) for part in fields(self.layout)}
        for name in sorted(arrays):
            found.update(name.encode())
            found.update(np.ascontiguousarray(arrays[name]).tobytes())
        return found.hexdigest()


@dataclass(frozen=True, slots=True)
class NoArtifact:
    """There is no usable artifact; `reason` says what to do."""

    reason: str


FindArtifact: TypeAlias = Callable[[str], PolicyArtifact | NoArtifact]
"""Gives the artifact of a learned policy's name; whoever builds policies passes one in."""


def no_artifact(name: str) -> NoArtifact:
    """What a controller without a folder of learned policies knows."""
    return NoArtifact(
        f"no trained policy {name}; train one with `edge-controller lab train {name}` and set "
        "routing.ppo_artifacts"
    )
