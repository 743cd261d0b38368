"""What one finished request cost."""

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """How a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class FailureKind(enum.Enum):
    """Why a node could not answer. The first three started nothing, so the request may move."""

    MODEL_NOT_LOADED = "model_not_loaded"
    DRAINING = "draining"
    QUEUE_FULL = "queue_full"
    INVALID_REQUEST = "invalid_request"
    CONTEXT_EXCEEDED = "context_exceeded"
    ENGINE_CRASHED = "engine_crashed"
    TIME_LIMIT = "time_limit"
    INTERNAL = "internal"

    @property
    def may_move(self) -> bool:
        """Whether another node may succeed where this one failed."""
        return self in _MOVABLE


_MOVABLE = frozenset(
    {
        FailureKind.MODEL_NOT_LOADED,
        FailureKind.DRAINING,
        FailureKind.QUEUE_FULL,
        FailureKind.ENGINE_CRASHED,
    }
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Measured by the node; `energy_joules` is None when it can neither measure nor estimate.

    Attributes:
        prefill_joules, decode_joules: how energy_joules splits; None when unknown.
        cached_prompt_tokens: prompt tokens that were not read again, since an earlier turn's keys
            and values were still held.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    energy_joules: float | None = None
    energy_source: str = "none"
    prefill_joules: float | None = None
    decode_joules: float | None = None
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one work order, as the node reported it."""

    reason: FinishReason
    usage: Usage
    failure: FailureKind | None = None
    message: str = ""
