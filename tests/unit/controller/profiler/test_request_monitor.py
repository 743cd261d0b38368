import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.cluster import InFlightWork
from controller.ids import ModelName, RequestId
from controller.profiler.request_monitor import Claim, DecodeSeen, PrefillSeen, RequestMonitor

MODEL, OTHER = ModelName("small"), ModelName("other")
work = st.floats(0.0, 1e4)
tokens = st.integers(0, 5000)


def monitor_with(*work_seconds: float, now: float = 0.0) -> RequestMonitor:
    monitor = RequestMonitor()
    for index, seconds in enumerate(work_seconds):
        monitor.dispatched(RequestId(f"r{index}"), Claim(MODEL, seconds, 100.0), now)
    return monitor


def test_backlog_is_the_work_that_was_claimed() -> None:
    """A claim counts at once, without waiting for the node to say anything."""
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


# -- what is left of each request ------------------------------------------------------------------


def reading(prompt_tokens: float, seconds: float, model: ModelName = MODEL) -> Claim:
    """Of an answer of 100 tokens that takes 3 s after its prompt is read."""
    return Claim(model, 3.0 + seconds, 100.0, seconds, prompt_tokens, 104)


def test_first_token_pays_for_the_prompt() -> None:
    monitor = RequestMonitor()
    monitor.dispatched(RequestId("r0"), reading(200.0, 1.0), 0.0)
    assert monitor.backlog_seconds(0.0) == pytest.approx(4.0)
    monitor.progressed(RequestId("r0"), 1, 1.0)
    assert monitor.backlog_seconds(1.0) == pytest.approx(3.0 * 0.99)


def test_time_is_taken_off_since_the_latest_sign_of_any_request() -> None:
    monitor = monitor_with(4.0, 4.0)
    monitor.progressed(RequestId("r1"), 50, 2.0)
    assert monitor.backlog_seconds(3.0) == pytest.approx(4.0 + 2.0 - 1.0)


def test_claim_takes_nothing_away_from_the_work_that_was_done_before_it() -> None:
    monitor = monitor_with(4.0)
    monitor.dispatched(RequestId("later"), Claim(MODEL, 4.0, 100.0), 2.0)
    assert monitor.backlog_seconds(3.0) == pytest.approx(5.0)


def test_new_work_is_not_taken_for_done_by_a_node_that_was_silent_for_long() -> None:
    monitor = monitor_with(10.0)
    monitor.dispatched(RequestId("later"), Claim(MODEL, 10.0, 100.0), 1e4)
    assert monitor.backlog_seconds(1e4) == pytest.approx(11.0)


def test_wait_of_a_request_is_no_work_on_it() -> None:
    monitor = monitor_with(10.0, 10.0)
    monitor.ended(RequestId("r0"), 10.0)
    assert monitor.backlog_seconds(10.0) == pytest.approx(10.0)


def test_end_of_a_request_that_only_waited_is_no_sign_of_progress() -> None:
    monitor = monitor_with(10.0, 10.0)
    monitor.ended(RequestId("r1"), 8.0)
    assert monitor.backlog_seconds(8.0) == pytest.approx(2.0)


def test_prompt_of_a_request_that_waited_is_still_to_be_read() -> None:
    monitor = RequestMonitor()
    for name in ("r0", "r1"):
        monitor.dispatched(RequestId(name), reading(100.0, 2.0), 0.0)
    monitor.ended(RequestId("r0"), 2.0)
    (waited,) = monitor.in_flight(2.0)
    assert waited.prompt_tokens == pytest.approx(100.0)


def test_prompt_that_came_to_a_silent_node_is_not_taken_for_read() -> None:
    monitor = RequestMonitor()
    monitor.dispatched(RequestId("r0"), reading(100.0, 2.0), 0.0)
    monitor.dispatched(RequestId("r1"), reading(100.0, 2.0), 50.0)
    assert monitor.in_flight(50.5)[1].prompt_tokens == pytest.approx(75.0)


jobs = st.tuples(st.floats(0.0, 20.0), st.floats(0.1, 10.0))  # seconds since the last, and of work


@given(st.lists(jobs, min_size=1, max_size=8), st.floats(0.0, 1.0))
def test_backlog_is_what_is_left_when_each_takes_what_was_claimed(
    arriving: list[tuple[float, float]], moment: float
) -> None:
    """Nothing streams: the ends alone say how far the node has come."""
    monitor, now, free = RequestMonitor(), 0.0, 0.0
    events: list[tuple[float, int, str]] = []
    left: dict[str, tuple[float, float, float]] = {}
    for index, (gap, seconds) in enumerate(arriving):
        now += gap
        began, free = max(now, free), max(now, free) + seconds
        left[f"r{index}"] = (began, free, seconds)
        events += [(now, 1, f"r{index}"), (free, 0, f"r{index}")]
    until = moment * free
    for at, is_claim, name in sorted(events):
        if at > until:
            break
        if is_claim:
            monitor.dispatched(RequestId(name), Claim(MODEL, left[name][2], 100.0), at)
        else:
            monitor.ended(RequestId(name), at)
    there = [left[name] for name in left if monitor.is_in_flight(RequestId(name))]
    true = sum(min(end - until, seconds) for _, end, seconds in there)
    longest = max((seconds for _, _, seconds in there), default=0.0)
    assert true - 1e-6 <= monitor.backlog_seconds(until) <= true + 0.1 * longest + 1e-6


def test_prompts_are_read_in_the_order_of_their_claims() -> None:
    monitor = RequestMonitor()
    for name in ("r0", "r1"):
        monitor.dispatched(RequestId(name), reading(100.0, 2.0), 0.0)
    first, second = monitor.in_flight(3.0)
    assert first.prompt_tokens == pytest.approx(5.0)  # read, but for what cannot be known
    assert second.prompt_tokens == pytest.approx(45.0)  # 1.1 s are left of the 3 s


@pytest.mark.parametrize(("streamed", "left"), [(0, 100.0), (40, 60.0), (99, 5.0), (104, 0.0)])
def test_tokens_that_are_left_respect_the_limit(streamed: int, left: float) -> None:
    """An answer that outgrows its prediction keeps a tenth of it, but never exceeds max_tokens."""
    monitor = RequestMonitor()
    monitor.dispatched(RequestId("r0"), reading(100.0, 2.0), 0.0)
    monitor.progressed(RequestId("r0"), streamed, 1.0)
    (found,) = monitor.in_flight(1.0)
    prompt_tokens = 0.0 if streamed else 50.0
    assert found == InFlightWork(MODEL, pytest.approx(prompt_tokens), pytest.approx(left))


def test_answer_without_a_limit_keeps_a_tenth() -> None:
    monitor = monitor_with(4.0)
    monitor.progressed(RequestId("r0"), 99, 1.0)
    assert monitor.in_flight(1.0)[0].output_tokens == pytest.approx(10.0)


# -- in which company ------------------------------------------------------------------------------


def test_prompts_that_were_read_together_are_seen_as_one() -> None:
    """1. r0 at 0 s, r1 at 1 s. 2. r0 writes from 3 s on. 3. r1 begins to write at 5 s."""
    monitor = RequestMonitor()
    monitor.dispatched(RequestId("r0"), reading(100.0, 1.0), 0.0)
    monitor.dispatched(RequestId("r1"), reading(50.0, 1.0), 1.0)
    assert monitor.progressed(RequestId("r0"), 1, 3.0) is None
    seen = monitor.progressed(RequestId("r1"), 1, 5.0)
    assert seen == PrefillSeen(MODEL, 150.0, 5.0, pytest.approx(2.0 / 5.0), pytest.approx(1.0))


def test_single_prompt_is_told_by_its_completion_and_not_here() -> None:
    monitor = RequestMonitor()
    monitor.dispatched(RequestId("r0"), reading(100.0, 1.0), 0.0)
    assert monitor.progressed(RequestId("r0"), 1, 3.0) is None


def test_prompt_that_was_given_up_spoils_what_its_group_tells() -> None:
    monitor = RequestMonitor()
    for name in ("r0", "r1", "r2"):
        monitor.dispatched(RequestId(name), reading(100.0, 1.0), 0.0)
    assert monitor.ended(RequestId("r0"), 2.0) is None  # it had streamed nothing
    monitor.progressed(RequestId("r1"), 1, 4.0)
    assert monitor.progressed(RequestId("r2"), 1, 5.0) is None
    for name in ("r3", "r4"):  # nobody reads any more, so they are a group of their own
        monitor.dispatched(RequestId(name), reading(100.0, 1.0), 6.0)
    monitor.progressed(RequestId("r3"), 1, 7.0)
    assert monitor.progressed(RequestId("r4"), 1, 8.0) == PrefillSeen(
        MODEL, 200.0, 2.0, pytest.approx((2 * 1 + 3 * 1) / 2), pytest.approx(1.0)
    )


def test_company_of_an_answer_is_what_was_written_and_read_beside_it() -> None:
    """1. r0 writes from 1 s on. 2. r1 comes at 1 s and writes from 2 s on. 3. The other model is
    busy from 2 s on. 4. r0 ends at 3 s."""
    monitor = RequestMonitor()
    monitor.dispatched(RequestId("r0"), reading(100.0, 1.0), 0.0)
    monitor.progressed(RequestId("r0"), 1, 1.0)
    monitor.dispatched(RequestId("r1"), reading(100.0, 0.5), 1.0)
    monitor.progressed(RequestId("r1"), 1, 2.0)
    monitor.dispatched(RequestId("r2"), reading(100.0, 0.5, OTHER), 2.0)
    assert monitor.ended(RequestId("r0"), 3.0) == DecodeSeen(
        MODEL,
        mean_sequences=pytest.approx(1.5),
        prefill_ratio=pytest.approx(0.25),
        was_alone_in_prefill=True,
        decoding_in_prefill=0.0,
        mean_busy_models=pytest.approx(1.5),
        prefill_busy_models=pytest.approx(1.0),
    )
    seen = monitor.ended(RequestId("r1"), 4.0)
    assert seen is not None
    assert seen.was_alone_in_prefill, "the other one wrote already"
    assert seen.decoding_in_prefill == pytest.approx(1.0)
    assert seen.mean_busy_models == pytest.approx(2.0)


def test_whoever_reads_beside_another_is_not_alone_nor_is_the_other() -> None:
    monitor = RequestMonitor()
    for name, model in (("r0", MODEL), ("r1", MODEL), ("r2", OTHER)):
        monitor.dispatched(RequestId(name), reading(100.0, 1.0, model), 0.0)
    alone = {}
    for name in ("r0", "r1", "r2"):
        monitor.progressed(RequestId(name), 1, 1.0)
        seen = monitor.ended(RequestId(name), 2.0)
        assert seen is not None
        alone[name] = seen.was_alone_in_prefill
    assert alone == {"r0": False, "r1": False, "r2": True}


def alone_afterwards(monitor: RequestMonitor, now: float) -> bool:
    """Whether the next request finds nobody, neither reading nor writing."""
    monitor.dispatched(RequestId("next"), reading(100.0, 1.0), now)
    monitor.progressed(RequestId("next"), 1, now + 1.0)
    seen = monitor.ended(RequestId("next"), now + 2.0)
    assert seen is not None
    return seen == DecodeSeen(MODEL, 1.0, 0.0, True, 0.0, 1.0, 1.0)


@pytest.mark.parametrize("model", [MODEL, OTHER])
@pytest.mark.parametrize("had_begun", [True, False])
def test_nothing_is_left_of_what_ended(had_begun: bool, model: ModelName) -> None:
    monitor = RequestMonitor()
    monitor.dispatched(RequestId("r0"), reading(100.0, 1.0, model), 0.0)
    if had_begun:
        monitor.progressed(RequestId("r0"), 1, 1.0)
    monitor.ended(RequestId("r0"), 2.0)
    assert alone_afterwards(monitor, 3.0)


def test_second_claim_of_a_request_takes_the_place_of_the_first() -> None:
    monitor = RequestMonitor()
    for work_seconds in (4.0, 2.0):
        monitor.dispatched(RequestId("r0"), Claim(MODEL, work_seconds, 100.0), 0.0)
    assert (len(monitor), monitor.backlog_seconds(0.0)) == (1, pytest.approx(2.0))
    monitor.ended(RequestId("r0"), 1.0)
    assert alone_afterwards(monitor, 2.0)


def test_node_that_is_gone_leaves_nothing() -> None:
    monitor = monitor_with(4.0, 2.0)
    assert monitor.clear() == 2
    assert (len(monitor), monitor.backlog_seconds(1.0), monitor.paper.at(1.0)) == (0, 0.0, 0.0)
    assert alone_afterwards(monitor, 2.0)


def test_paper_backlog_passes_with_time_and_not_beyond() -> None:
    monitor = monitor_with(4.0, 2.0)
    assert [monitor.paper.at(now) for now in (0.0, 5.0, 7.0)] == pytest.approx([6.0, 1.0, 0.0])
    monitor.dispatched(RequestId("later"), Claim(MODEL, 1.0, 100.0), 8.0)
    assert monitor.paper.at(8.0) == pytest.approx(1.0)
