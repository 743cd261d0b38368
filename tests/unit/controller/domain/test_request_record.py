import pytest

from controller.domain.request import InferenceRequest
from controller.domain.request_record import RequestRecord, RequestRecords, RequestState
from controller.errors import UnknownRequestError
from controller.ids import RequestId


def record(name: str) -> RequestRecord:
    return RequestRecord(InferenceRequest(RequestId(name), "Hello"), 0.0, 0.0)


def test_running_and_finished_requests_are_known() -> None:
    records = RequestRecords(10)
    records.add(record("a"))
    records.add(record("b"))
    records.close(RequestId("a"), RequestState.FAILED, "the node was lost")
    assert list(records.running) == ["b"]
    finished = records.get(RequestId("a"))
    assert (finished.state, finished.error) == (RequestState.FAILED, "the node was lost")
    assert finished.state.is_final
    assert not records.get(RequestId("b")).state.is_final


def test_first_ending_counts() -> None:
    records = RequestRecords(10)
    records.add(record("a"))
    records.close(RequestId("a"), RequestState.COMPLETED)
    records.close(RequestId("a"), RequestState.CANCELLED, "the client went away")
    assert records.get(RequestId("a")).state is RequestState.COMPLETED


def test_only_the_latest_finished_requests_are_kept() -> None:
    records = RequestRecords(2)
    for name in ("a", "b", "c"):
        records.add(record(name))
        records.close(RequestId(name), RequestState.COMPLETED)
    assert records.get(RequestId("b"))
    with pytest.raises(UnknownRequestError, match="'a'; the last 2 are kept"):
        records.get(RequestId("a"))


def test_running_requests_are_never_dropped() -> None:
    records = RequestRecords(0)
    for name in ("a", "b", "c"):
        records.add(record(name))
    records.close(RequestId("b"), RequestState.COMPLETED)
    assert list(records.running) == ["a", "c"]


def test_id_that_is_used_again_has_one_record_and_counts_its_attempts_on() -> None:
    """Nodes ignore an attempt that they have seen, so a second use must not start at 1."""
    records = RequestRecords(10)
    first = record("a")
    records.add(first)
    first.attempts = 2
    assert first.attempt_number == 2
    records.close(RequestId("a"), RequestState.COMPLETED)
    second = record("a")
    records.add(second)
    assert records.get(RequestId("a")) is second
    second.attempts = 1
    assert second.attempt_number == 3
