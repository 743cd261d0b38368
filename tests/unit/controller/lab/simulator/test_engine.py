"""Queues worked by hand, and what must hold for any."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.lab.simulator.engine import OVERDUE_SECONDS, Cluster, Lost


def cluster(*slots: int) -> Cluster:
    return Cluster(np.array(slots, dtype=np.int64))


def times(completions: object) -> list[tuple[int, float, float]]:
    return [(c.request, c.started, c.finished) for c in completions]  # type: ignore[attr-defined]


def test_one_slot_serves_in_the_order_of_sending() -> None:
    node = cluster(1)
    node.send(0, 0, 4.0, 4.0)
    node.advance(1.0)
    node.send(1, 0, 2.0, 2.0)
    node.advance(2.0)
    node.send(2, 0, 1.0, 1.0)
    # 2 s left of the first, then 2 s of the second, then 1 s of the third.
    np.testing.assert_allclose(node.waits(), [5.0])
    assert times(node.advance(10.0)) == [(0, 0.0, 4.0), (1, 4.0, 6.0), (2, 6.0, 7.0)]
    assert node.waits()[0] == 0.0
    assert node.utilisation()[0] == pytest.approx(0.7)


def test_two_slots_start_the_third_when_the_first_is_free() -> None:
    node = cluster(2)
    for request, seconds in enumerate((5.0, 2.0, 4.0)):
        node.send(request, 0, seconds, seconds)
    # The slots end at 5 and 2; the third takes the latter until 6, so 5 is next.
    np.testing.assert_allclose(node.waits(), [5.0])
    assert times(node.advance(6.0)) == [(1, 0.0, 2.0), (0, 0.0, 5.0), (2, 2.0, 6.0)]
    assert node.utilisation()[0] == pytest.approx(11.0 / 12.0)


def test_waits_are_predicted_until_the_ending_is_seen() -> None:
    node = cluster(1)
    node.send(0, 0, predicted=1.0, real=3.0)
    assert node.waits()[0] == 1.0
    node.advance(2.0)
    assert node.waits()[0] == OVERDUE_SECONDS
    node.advance(3.0)
    assert node.waits()[0] == 0.0


def test_a_failed_node_gives_back_what_it_had_and_takes_nothing_until_it_joins() -> None:
    pair = cluster(1, 1)
    pair.send(7, 0, 4.0, 4.0)
    pair.send(8, 0, 4.0, 4.0)
    pair.advance(1.0)
    assert pair.fail(0) == [Lost(7, 0.25), Lost(8, 0.0)]
    assert pair.fail(0) == []
    assert pair.next_completion() == math.inf
    assert pair.waits()[0] == 0.0
    assert pair.wasted_seconds.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="down"):
        pair.send(7, 0, 4.0, 4.0)
    pair.advance(3.0)
    pair.join(0)
    pair.send(7, 0, 4.0, 4.0)
    assert times(pair.advance(9.0)) == [(7, 3.0, 7.0)]
    # Up in 0..1 and 3..9, serving 1 s that was lost and 4 s that were not.
    assert pair.utilisation()[0] == pytest.approx(5.0 / 7.0)


def test_time_does_not_go_back() -> None:
    node = cluster(1)
    node.advance(2.0)
    with pytest.raises(ValueError, match="forward"):
        node.advance(1.0)
    with pytest.raises(ValueError, match="finite"):
        node.advance(math.inf)


@settings(max_examples=40, deadline=None)
@given(
    slots=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    jobs=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0.01, 9.0), st.floats(0.0, 3.0)),
        min_size=1,
        max_size=30,
    ),
)
def test_work_is_conserved_and_no_slot_idles_before_a_queue(
    slots: list[int], jobs: list[tuple[int, float, float]]
) -> None:
    nodes = cluster(*slots)
    done, sent = [], {}
    for request, (node, seconds, gap) in enumerate(jobs):
        done += nodes.advance(nodes.now + gap)
        sent[request] = (nodes.now, node % len(slots), seconds)
        nodes.send(request, node % len(slots), seconds, seconds)
    done += nodes.advance(nodes.now + 1000.0)
    assert nodes.unfinished == 0
    assert sorted(c.request for c in done) == sorted(sent)
    assert nodes.busy_seconds.sum() == pytest.approx(sum(seconds for _, seconds, _ in jobs))
    for c in done:
        arrived, node, seconds = sent[c.request]
        assert c.node == node
        assert c.finished - c.started == pytest.approx(seconds)
        if c.started > arrived + 1e-9:  # it waited, so just before its start all slots were busy
            busy = [o for o in done if o.node == node and o.started < c.started <= o.finished]
            assert len(busy) == slots[node]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 9.0), min_size=1, max_size=20), st.floats(0.0, 60.0))
def test_one_slot_waits_for_all_that_is_left(seconds: list[float], later: float) -> None:
    node = cluster(1)
    for request, each in enumerate(seconds):
        node.send(request, 0, each, each)
    node.advance(later)
    left = max(sum(seconds) - later, 0.0)
    assert node.waits()[0] == pytest.approx(left, abs=2.0 * OVERDUE_SECONDS)


def test_a_silent_node_takes_requests_and_serves_none_until_it_is_found_out() -> None:
    node = cluster(1)
    node.send(0, 0, 4.0, 4.0)
    node.advance(3.0)
    node.fall_silent(0)
    node.send(1, 0, 2.0, 2.0)
    assert node.advance(9.0) == []
    assert node.up[0]
    np.testing.assert_allclose(node.waits(), [2.0], atol=2.0 * OVERDUE_SECONDS)
    assert node.fail(0) == [Lost(0, 0.75), Lost(1, 0.0)]
    assert node.wasted_seconds[0] == 3.0
    assert node.up_seconds()[0] == 3.0
    node.join(0)
    node.send(2, 0, 1.0, 1.0)
    assert times(node.advance(20.0)) == [(2, 9.0, 10.0)]


def test_a_silent_node_with_free_slots_looks_free() -> None:
    node = cluster(2)
    node.fall_silent(0)
    node.send(0, 0, 4.0, 4.0)
    assert node.waits()[0] == 0.0
    node.send(1, 0, 6.0, 6.0)
    assert node.waits()[0] == 4.0


def test_the_state_tells_slots_queues_and_what_is_left() -> None:
    pair = cluster(1, 2)
    for request, seconds in enumerate((4.0, 3.0, 2.0)):
        pair.send(request, 0, seconds, seconds)
    pair.send(9, 1, 5.0, 5.0)
    pair.advance(1.0)
    state = pair.state()
    assert state.busy_slots.tolist() == [1, 1]
    assert state.queue_length.tolist() == [2, 0]
    np.testing.assert_allclose(state.remaining_seconds, [8.0, 4.0])
    np.testing.assert_allclose(state.wait_seconds, [8.0, 0.0])
    np.testing.assert_allclose(state.utilisation, [1.0, 0.5])
    assert state.is_up.all()


def test_a_long_queue_before_several_slots_waits_for_its_share_of_the_work() -> None:
    node = cluster(2)
    for request in range(60):
        node.send(request, 0, 1.0, 1.0)
    assert node.waits()[0] == pytest.approx(30.0)
