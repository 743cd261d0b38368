"""What one finished request cost."""

from dataclasses import dataclass

from pointsman.values import FailureKind as FailureKind
from pointsman.values import FinishReason as FinishReason
from pointsman.values import Usage as Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one work order, as the node reported it."""

    reason: FinishReason
    usage: Usage
    failure: FailureKind | None = None
    message: str = ""
