"""The contract that every routing policy keeps."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from controller.routing.problem import IntArray, RoutingProblem

UNASSIGNED = -1
"""The destination index of a request that no destination can take."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a policy may think. Both limits hold; None does not limit.

    A decision under `max_evaluations` alone is the same on every machine.

    Attributes:
        seconds: until the answer is wanted.
        max_evaluations: of assignments or moves.
        pause_seconds: the longest that this machine has lately kept a search waiting. One that
            thinks until the end may stop so much earlier.
    """

    seconds: float | None = 0.05
    max_evaluations: int | None = None
    pause_seconds: float = 0.0


class FallbackCause(enum.Enum):
    """Why another policy decided for a request than the one in force."""

    NO_ARTIFACT = "no_artifact"
    """A learned policy has no usable artifact."""
    UNKNOWN_FLEET = "unknown_fleet"
    """A learned policy was not trained on this fleet's nodes and models."""
    OUT_OF_RANGE = "out_of_range"
    """A request's inputs lie far outside what a learned policy was trained on."""
    TOO_LATE = "too_late"
    """The policy overran its budget by far."""
    FAILED = "failed"
    """The policy raised, or gave what cannot be used."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy chose.

    Attributes:
        assignment: int64[R]; destination index, or `UNASSIGNED` exactly where a request has no
            feasible destination.
        lower_bound: no assignment has a smaller J; None when the policy gives none.
        evaluations: assignments or moves that were scored.
        fallback_reason: why a simpler policy decided for it; empty when none had to.
        fallbacks: requests that a simpler policy decided, by cause.
        pause_seconds: the longest that the machine kept the search waiting; 0 when it did not look.
    """

    assignment: IntArray
    lower_bound: float | None = None
    evaluations: int = 0
    fallback_reason: str = ""
    fallbacks: Mapping[FallbackCause, int] = field(default_factory=dict)
    pause_seconds: float = 0.0


class RoutingPolicy(Protocol):
    """Chooses a destination for every request of a batch.

    Keeps: does no I/O, asks nobody, never changes the problem, returns feasible destinations only,
    gives the same answer for the same problem, `rng` state and evaluation budget.
    """

    @property
    def name(self) -> str:
        """The name operators select it by."""
        ...

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign the batch. Blocks for at most the budget; runs off the event loop."""
        ...
