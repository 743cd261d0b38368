from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.fleet.registry import Registry
from controller.ids import NodeId, SessionId

LEASE = 10.0
PI, VM = NodeId("pi"), NodeId("vm")
ONE, TWO, THREE = SessionId("one"), SessionId("two"), SessionId("three")


@pytest.fixture
def registry() -> Registry:
    return Registry(LEASE)


def expired_after_regular_checks(registry: Registry, start: float, end: float) -> list[str]:
    """Nodes whose lease ran out while somebody looked four times a lease."""
    found: list[str] = []
    for step in range(int((end - start) / (LEASE / 4)) + 1):
        for session in registry.expired(start + step * LEASE / 4):
            registry.end(session.session_id, session.node_id)
            found.append(session.node_id)
    return found


# -- leases ----------------------------------------------------------------------------------------


def test_silent_node_expires_with_its_lease(registry: Registry) -> None:
    registry.begin(ONE, PI, "first", 0.0)
    assert expired_after_regular_checks(registry, 0.0, LEASE - 1) == []
    assert expired_after_regular_checks(registry, LEASE, LEASE) == [PI]
    assert not registry.is_current(ONE, PI)


def test_anything_that_arrives_renews_the_lease(registry: Registry) -> None:
    registry.begin(ONE, PI, "first", 0.0)
    registry.begin(TWO, VM, "first", 0.0)
    registry.renew(PI, 6.0)
    assert expired_after_regular_checks(registry, 0.0, 15.0) == [VM]
    assert expired_after_regular_checks(registry, 15.0, 20.0) == [PI]


def test_stalled_controller_gives_everybody_one_more_lease(registry: Registry) -> None:
    """1. two nodes are connected and speak;
    2. the controller does nothing for three leases, so nothing is read meanwhile;
    3. nobody is lost; 4. whoever speaks again stays, whoever does not is lost one lease later.
    """
    registry.begin(ONE, PI, "first", 0.0)
    registry.begin(TWO, VM, "first", 0.0)
    assert registry.expired(1.0) == []
    assert registry.expired(1.0 + 3 * LEASE) == []
    registry.renew(PI, 32.0)
    assert expired_after_regular_checks(registry, 31.5, 41.5) == [VM]
    assert registry.is_current(ONE, PI)


def test_renewing_or_ending_an_unknown_session_changes_nothing(registry: Registry) -> None:
    registry.renew(PI, 1.0)
    assert not registry.end(ONE, PI)
    assert registry.expired(1.0) == []


# -- sessions --------------------------------------------------------------------------------------


def test_newer_session_speaks_for_its_node(registry: Registry) -> None:
    assert registry.begin(ONE, PI, "first", 0.0) is None
    old = registry.begin(TWO, PI, "first", 1.0)
    assert old is not None
    assert old.session_id == ONE
    assert not registry.is_current(ONE, PI)
    assert registry.is_current(TWO, PI)


def test_end_of_a_superseded_session_does_not_end_its_successor(registry: Registry) -> None:
    registry.begin(ONE, PI, "first", 0.0)
    registry.begin(TWO, PI, "first", 1.0)
    assert not registry.end(ONE, PI)
    assert registry.is_current(TWO, PI)
    assert registry.end(TWO, PI)
    assert not registry.end(TWO, PI)


# -- numbered facts --------------------------------------------------------------------------------


def test_repeated_fact_is_dropped_after_a_reconnect(registry: Registry) -> None:
    """What arrived before does not count again."""
    registry.begin(ONE, PI, "first", 0.0)
    assert registry.accept(PI, "first", 1)
    assert registry.accept(PI, "first", 2)
    registry.begin(TWO, PI, "first", 1.0)
    assert not registry.accept(PI, "first", 2)
    assert registry.accept(PI, "first", 3)


def test_repeat_is_also_known_after_the_session_had_ended(registry: Registry) -> None:
    registry.begin(ONE, PI, "first", 0.0)
    registry.accept(PI, "first", 7)
    registry.end(ONE, PI)
    registry.begin(TWO, PI, "first", 1.0)
    assert not registry.accept(PI, "first", 7)


def test_restarted_agent_counts_anew(registry: Registry) -> None:
    registry.begin(ONE, PI, "first", 0.0)
    registry.accept(PI, "first", 5)
    registry.keep(PI, "first", 5)
    registry.end(ONE, PI)
    registry.begin(TWO, PI, "second", 1.0)
    assert registry.acked_sequence(PI, "second") == 0
    assert registry.accept(PI, "second", 1)


def test_only_the_latest_start_of_an_agent_is_remembered(registry: Registry) -> None:
    """A node that restarts every minute for a year costs no memory."""
    for start in range(50):
        session = SessionId(f"session-{start}")
        registry.begin(session, PI, f"start-{start}", float(start))
        registry.accept(PI, f"start-{start}", 9)
        registry.keep(PI, f"start-{start}", 9)
        registry.end(session, PI)
    registry.begin(ONE, PI, "start-49", 100.0)
    assert registry.acked_sequence(PI, "start-49") == 9
    assert [registry.acked_sequence(PI, f"start-{start}") for start in range(49)] == [0] * 49


@given(st.lists(st.integers(1, 30)))
def test_each_fact_is_taken_in_once_and_in_order(sequences: list[int]) -> None:
    registry = Registry(LEASE)
    registry.begin(ONE, PI, "first", 0.0)
    taken = [sequence for sequence in sequences if registry.accept(PI, "first", sequence)]
    assert taken == sorted(set(taken))
    assert registry.last_settled(PI) == (("first", max(sequences)) if sequences else ("", 0))


@given(st.lists(st.booleans(), max_size=20), st.randoms())
def test_facts_are_settled_up_to_the_first_that_is_held(holds: list[bool], random: Random) -> None:
    registry = Registry(LEASE)
    for sequence, is_held in enumerate(holds, 1):
        registry.accept(PI, "first", sequence)
        if is_held:
            registry.hold(PI, sequence)
    held = [sequence for sequence, is_held in enumerate(holds, 1) if is_held]
    while held:
        assert registry.last_settled(PI) == ("first", min(held) - 1)
        settled = held.pop(random.randrange(len(held)))
        registry.settle(PI, "first", settled)
    assert registry.last_settled(PI)[1] == len(holds)


def test_what_an_earlier_start_held_is_forgotten(registry: Registry) -> None:
    registry.accept(PI, "first", 1)
    registry.hold(PI, 1)
    registry.accept(PI, "second", 1)
    registry.hold(PI, 1)
    registry.settle(PI, "first", 1)  # late, and of another count
    assert registry.last_settled(PI) == ("second", 0)
    registry.settle(PI, "second", 1)
    assert registry.last_settled(PI) == ("second", 1)


def test_keeping_is_news_once(registry: Registry) -> None:
    assert registry.keep(PI, "first", 4)
    assert not registry.keep(PI, "first", 4)
    assert not registry.keep(PI, "first", 3)
    assert registry.acked_sequence(PI, "first") == 4
    assert registry.keep(PI, "second", 1)


def test_drain_is_remembered_over_reconnects(registry: Registry) -> None:
    registry.set_draining(PI, True)
    registry.begin(ONE, PI, "first", 0.0)
    assert registry.is_draining(PI)
    assert not registry.is_draining(VM)
    registry.set_draining(PI, False)
    registry.set_draining(PI, False)
    assert not registry.is_draining(PI)


# -- the controller's own fault --------------------------------------------------------------------


def test_fleet_that_falls_silent_as_one_is_evicted_only_after_a_period_of_grace(
    registry: Registry,
) -> None:
    """Most nodes at once means that the controller itself is cut off."""
    for number in range(5):
        registry.begin(SessionId(f"s{number}"), NodeId(f"n{number}"), "first", 0.1 * number)
    assert expired_after_regular_checks(registry, 0.0, 2 * LEASE - 2.0) == []
    assert len(expired_after_regular_checks(registry, 2 * LEASE, 2.5 * LEASE)) == 5


def test_fleet_that_is_heard_again_in_the_period_of_grace_loses_nobody(
    registry: Registry,
) -> None:
    names = [NodeId(f"n{number}") for number in range(5)]
    for name in names:
        registry.begin(SessionId(name), name, "first", 0.0)
    assert expired_after_regular_checks(registry, 0.0, 1.4 * LEASE) == []
    for name in names:
        registry.renew(name, 1.5 * LEASE)
    assert expired_after_regular_checks(registry, 1.5 * LEASE, 2.4 * LEASE) == []


def test_nodes_that_fall_silent_one_by_one_have_no_grace(registry: Registry) -> None:
    names = [NodeId(f"n{number}") for number in range(4)]
    for name in names:
        registry.begin(SessionId(name), name, "first", 0.0)
    found: list[str] = []
    for step in range(8):
        now = step * LEASE / 4
        for name in names[1:]:
            registry.renew(name, now)
        found += [session.node_id for session in registry.expired(now)]
        for name in found:
            registry.end(SessionId(name), NodeId(name))
    assert found == [names[0]]
