import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.ids import ModelName, RequestId
from controller.profiler.request_monitor import Claim, RequestMonitor

MODEL = ModelName("small")
work = st.floats(0.0, 1e4)
tokens = st.integers(0, 5000)


def monitor_with(*work_seconds: float, now: float = 0.0) -> RequestMonitor:
    monitor = RequestMonitor()
    for index, seconds in enumerate(work_seconds):
        monitor.dispatched(RequestId(f"r{index}"), Claim(MODEL, seconds, 100.0), now)
    return monitor


def test_backlog_is_the_work_that_was_claimed() -> None:
    """Case R4: a claim counts at once, without waiting for the node to say anything."""
    assert monitor_with(2.0, 3.0).backlog_seconds(0.0) == pytest.approx(5.0)
    assert RequestMonitor().backlog_seconds(0.0) == 0.0


def test_streamed_tokens_pay_for_their_share_of_the_work() -> None:
    monitor = monitor_with(4.0)
    monitor.progressed(RequestId("r0"), 25, 1.0)
    assert monitor.backlog_seconds(1.0) == pytest.approx(3.0)
    monitor.progressed(RequestId("r0"), 50, 2.0)
    assert monitor.backlog_seconds(2.0) == pytest.approx(1.0)


def test_answer_that_outgrows_its_prediction_keeps_a_tenth_of_its_work() -> None:
    monitor = monitor_with(4.0)
    monitor.progressed(RequestId("r0"), 5000, 1.0)
    assert monitor.backlog_seconds(1.0) == pytest.approx(0.4)


def test_time_since_the_last_sign_of_progress_is_taken_off() -> None:
    assert monitor_with(4.0, 2.0).backlog_seconds(1.5) == pytest.approx(4.5)


def test_node_that_went_silent_never_looks_idle() -> None:
    assert monitor_with(4.0, 2.0).backlog_seconds(1e6) == pytest.approx(0.4)


def test_ends_of_unknown_requests_are_harmless() -> None:
    monitor = monitor_with(4.0)
    monitor.ended(RequestId("other"), 0.0)
    monitor.progressed(RequestId("other"), 5, 1.0)
    assert len(monitor) == 1
    assert monitor.backlog_seconds(0.0) == pytest.approx(4.0)


@given(st.lists(st.tuples(work, tokens)), work, st.floats(0.0, 1e5))
def test_more_work_never_lowers_the_backlog(
    running: list[tuple[float, int]], new_work: float, wait_seconds: float
) -> None:
    monitor = RequestMonitor()
    for index, (seconds, streamed) in enumerate(running):
        monitor.dispatched(RequestId(f"r{index}"), Claim(MODEL, seconds, 100.0), 0.0)
        monitor.progressed(RequestId(f"r{index}"), streamed, 0.0)
    before = monitor.backlog_seconds(wait_seconds)
    monitor.dispatched(RequestId("new"), Claim(MODEL, new_work, 100.0), wait_seconds)
    assert monitor.backlog_seconds(wait_seconds) >= before


@given(st.lists(work, min_size=1), tokens, st.floats(0.0, 1e5))
def test_more_streamed_tokens_never_raise_the_backlog(
    running: list[float], streamed: int, now: float
) -> None:
    monitor = monitor_with(*running, now=now)
    before = monitor.backlog_seconds(now)
    monitor.progressed(RequestId("r0"), streamed, now)
    assert monitor.backlog_seconds(now) <= before


@pytest.mark.parametrize("reported", [-1, -5000])
def test_node_that_reports_negative_tokens_does_not_raise_its_backlog(reported: int) -> None:
    monitor = monitor_with(4.0)
    monitor.progressed(RequestId("r0"), reported, 0.0)
    assert monitor.backlog_seconds(0.0) <= 4.0


@given(st.lists(work, min_size=1), st.floats(0.0, 1e9))
def test_backlog_is_zero_exactly_when_nothing_is_in_flight(
    running: list[float], now: float
) -> None:
    monitor = monitor_with(*(seconds + 0.001 for seconds in running))
    for index in range(len(running)):
        assert monitor.backlog_seconds(now) > 0.0
        monitor.ended(RequestId(f"r{index}"), now)
    assert monitor.backlog_seconds(now) == 0.0
    assert len(monitor) == 0
