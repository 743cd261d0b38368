from hypothesis import given
from hypothesis import strategies as st

from edge_agent.link.outbox import Outbox


def filled(count: int, capacity: int = 100) -> Outbox[str]:
    outbox: Outbox[str] = Outbox(capacity)
    for number in range(1, count + 1):
        assert outbox.add(f"fact {number}") == number
    return outbox


def test_fact_waits_until_it_is_acknowledged() -> None:
    outbox = filled(3)
    assert outbox.pending() == [(1, "fact 1"), (2, "fact 2"), (3, "fact 3")]
    outbox.acknowledge(2)
    assert outbox.pending() == [(3, "fact 3")]
    outbox.acknowledge(2)
    outbox.acknowledge(0)
    assert len(outbox) == 1
    outbox.acknowledge(3)
    assert outbox.pending() == []


def test_numbers_go_on_after_everything_was_acknowledged() -> None:
    outbox = filled(2)
    outbox.acknowledge(2)
    assert outbox.add("next") == 3


def test_acknowledgement_from_the_future_empties_it_and_no_more() -> None:
    """A controller that remembers more than this agent has said."""
    outbox = filled(2)
    outbox.acknowledge(1000)
    assert len(outbox) == 0
    assert outbox.add("next") == 3
    assert outbox.pending() == [(3, "next")]


def test_oldest_facts_are_dropped_and_counted_when_it_is_full() -> None:
    outbox = filled(5, capacity=3)
    assert [sequence for sequence, _ in outbox.pending()] == [3, 4, 5]
    assert outbox.dropped == 2


def test_what_is_pending_is_a_copy() -> None:
    outbox = filled(1)
    outbox.pending().clear()
    assert len(outbox) == 1


@given(st.lists(st.one_of(st.just("add"), st.integers(0, 30)), max_size=60), st.integers(1, 10))
def test_pending_facts_are_the_unacknowledged_ones_in_order_and_bounded(
    steps: list[str | int], capacity: int
) -> None:
    outbox: Outbox[int] = Outbox(capacity)
    acknowledged, added = 0, 0
    for step in steps:
        if isinstance(step, int):
            outbox.acknowledge(step)
            acknowledged = max(acknowledged, min(step, added))
        else:
            added += 1
            assert outbox.add(added) == added
        expected = list(range(acknowledged + 1, added + 1))[-capacity:]
        assert outbox.pending() == [(number, number) for number in expected]
        assert len(outbox) == len(expected)
