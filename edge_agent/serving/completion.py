"""What one work order cost, as it is told to the controller and shown in the status."""

from dataclasses import dataclass, field

from pointsman.values import FailureKind as FailureKind
from pointsman.values import FinishReason as FinishReason
from pointsman.values import Usage as Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one work order.

    Attributes:
        total_seconds: from arrival at the node to the end.
        ended_at: monotonic seconds; never leaves this process.
    """

    request_id: str
    attempt: int
    model: str
    outcome: FinishReason
    usage: Usage = field(default_factory=Usage)
    total_seconds: float = 0.0
    failure: FailureKind | None = None
    message: str = ""
    ended_at: float | None = None
