"""What happens to a dispatched request when something happens to its node."""

from dataclasses import dataclass

from controller.domain.completion import Completion, FailureKind, FinishReason


@dataclass(frozen=True, slots=True)
class Attempt:
    """One dispatch of a request.

    Attributes:
        number: 1 for the first.
        tokens_sent: tokens the client has been given in this attempt.
    """

    number: int
    tokens_sent: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The request ended well; its account goes to the client."""

    completion: Completion


@dataclass(frozen=True, slots=True)
class Requeue:
    """Nothing was shown to the client yet, so the request starts again elsewhere, unseen."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The client is told."""

    kind: FailureKind
    message: str


Outcome = Finish | Requeue | Fail


def on_completion(attempt: Attempt, completion: Completion, max_attempts: int) -> Outcome:
    """Decide what a node's last word on a work order means for the request.

    A request that its client cancelled is not current any more. An answer that ends as cancelled
    and still has a client was cut off by the node itself, when it stopped or lost the link for a
    moment, and must not look like a whole one (case S5).
    """
    if completion.reason is FinishReason.CANCELLED:
        why = completion.message or "the node cut the answer off"
        return _again_or_fail(attempt, FailureKind.DRAINING, why, max_attempts, True)
    if completion.reason is not FinishReason.FAILED:
        return Finish(completion)
    kind = completion.failure or FailureKind.INTERNAL
    message = completion.message or kind.value.replace("_", " ")
    return _again_or_fail(attempt, kind, message, max_attempts, kind.may_move)


def on_node_lost(attempt: Attempt, why: str, max_attempts: int) -> Outcome:
    """Decide what becomes of a request whose node went away.

    One that has streamed tokens cannot start again unseen: another model, or another draw of the
    same one, would not continue the text that the client already has.
    """
    return _again_or_fail(attempt, FailureKind.INTERNAL, why, max_attempts, True)


def _again_or_fail(
    attempt: Attempt, kind: FailureKind, message: str, max_attempts: int, may_move: bool
) -> Outcome:
    if may_move and attempt.tokens_sent == 0 and attempt.number < max_attempts:
        return Requeue(message)
    return Fail(kind, message)
