"""What one work order cost, as it is told to the controller and shown in the status."""

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    """How a work order ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class FailureKind(enum.Enum):
    """Why it failed; names follow WorkFailureKind in fleet.proto."""

    MODEL_NOT_LOADED = "model_not_loaded"
    DRAINING = "draining"
    QUEUE_FULL = "queue_full"
    INVALID_REQUEST = "invalid_request"
    CONTEXT_EXCEEDED = "context_exceeded"
    ENGINE_CRASHED = "engine_crashed"
    TIME_LIMIT = "time_limit"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one work order.

    Attributes:
        energy_joules: of this request alone; None when there is neither sensor nor power model.
        energy_source: the sensor's name, or "estimate"; None takes them for an estimate.
        prefill_joules, decode_joules: the parts that the prompt and the answer took; None with it,
            or when nobody can tell them apart.
        cached_prompt_tokens: of the prompt, held from an earlier turn and not read anew.
        total_seconds: from arrival at the node to the end.
        ended_at: monotonic seconds; never leaves this process.
    """

    request_id: str
    attempt: int
    model: str
    outcome: Outcome
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    total_seconds: float = 0.0
    energy_joules: float | None = None
    energy_source: str | None = None
    failure: FailureKind | None = None
    message: str = ""
    prefill_joules: float | None = None
    decode_joules: float | None = None
    cached_prompt_tokens: int = 0
    ended_at: float | None = None
