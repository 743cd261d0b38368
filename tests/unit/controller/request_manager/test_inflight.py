import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.completion import Completion, FailureKind, FinishReason, Usage
from controller.request_manager.inflight import (
    Attempt,
    Fail,
    Finish,
    Requeue,
    on_completion,
    on_node_lost,
)

MOVABLE = {
    FailureKind.MODEL_NOT_LOADED,
    FailureKind.DRAINING,
    FailureKind.QUEUE_FULL,
    FailureKind.ENGINE_CRASHED,
}


def failed(kind: FailureKind | None, message: str = "") -> Completion:
    return Completion(FinishReason.FAILED, Usage(), kind, message)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_completed_answer_finishes(reason: FinishReason) -> None:
    completion = Completion(reason, Usage(3, 4))
    assert on_completion(Attempt(1, 4), completion, 3) == Finish(completion)


@pytest.mark.parametrize("kind", FailureKind)
def test_only_failures_that_may_go_better_elsewhere_move(kind: FailureKind) -> None:
    outcome = on_completion(Attempt(1, 0), failed(kind, "why"), 3)
    assert outcome == (Requeue("why") if kind in MOVABLE else Fail(kind, "why"))


@pytest.mark.parametrize("kind", FailureKind)
def test_request_that_streamed_tokens_never_starts_again(kind: FailureKind) -> None:
    """Case S8: a retry elsewhere only before the first token."""
    assert on_completion(Attempt(1, 1), failed(kind, "why"), 3) == Fail(kind, "why")


@pytest.mark.parametrize("tokens_sent", [0, 5])
def test_answer_that_the_node_itself_cut_off_is_not_a_finished_one(tokens_sent: int) -> None:
    """Case S5: nobody asked to cancel, since a cancelled request is not current any more."""
    completion = Completion(FinishReason.CANCELLED, Usage(3, 4))
    outcome = on_completion(Attempt(1, tokens_sent), completion, 3)
    assert isinstance(outcome, Fail if tokens_sent else Requeue)


def test_failure_without_a_kind_or_a_message_is_still_told() -> None:
    assert on_completion(Attempt(1, 0), failed(None), 3) == Fail(FailureKind.INTERNAL, "internal")
    assert on_completion(Attempt(3, 0), failed(FailureKind.QUEUE_FULL), 3) == Fail(
        FailureKind.QUEUE_FULL, "queue full"
    )


def test_lost_node_moves_what_was_not_shown_and_fails_what_was() -> None:
    assert on_node_lost(Attempt(1, 0), "power cut", 3) == Requeue("power cut")
    assert on_node_lost(Attempt(1, 7), "power cut", 3) == Fail(FailureKind.INTERNAL, "power cut")


@given(st.integers(1, 10), st.integers(1, 10), st.sampled_from(sorted(MOVABLE, key=str)))
def test_request_is_dispatched_at_most_max_attempts_times(
    number: int, max_attempts: int, kind: FailureKind
) -> None:
    for outcome in (
        on_completion(Attempt(number, 0), failed(kind), max_attempts),
        on_node_lost(Attempt(number, 0), "lost", max_attempts),
    ):
        assert isinstance(outcome, Requeue if number < max_attempts else Fail)
