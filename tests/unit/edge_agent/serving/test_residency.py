"""Who shares the memory, and who makes room."""

from hypothesis import given
from hypothesis import strategies as st

from edge_agent.serving.residency import NoRoom, Resident, Room, make_room

MIB = 1 << 20


def resident(
    name: str, mebibytes: int, used_at: float = 0.0, is_pinned: bool = False, is_busy: bool = False
) -> Resident:
    return Resident(name, mebibytes * MIB, is_pinned, is_busy, used_at)


def test_nobody_goes_while_there_is_room() -> None:
    assert make_room("new", 60 * MIB, 100 * MIB, [resident("a", 40)], 9.0) == Room()


def test_the_one_used_longest_ago_goes_first_and_no_more_than_needed() -> None:
    there = [resident("a", 40, 3.0), resident("b", 40, 1.0), resident("c", 20, 2.0)]
    assert make_room("new", 30 * MIB, 100 * MIB, there, 9.0) == Room(("b",))
    assert make_room("new", 60 * MIB, 100 * MIB, there, 9.0) == Room(("b", "c"))


def test_pinned_busy_and_just_used_ones_stay_and_the_refusal_has_the_numbers() -> None:
    there = [
        resident("pinned", 40, is_pinned=True),
        resident("busy", 30, is_busy=True),
        resident("fresh", 20, 8.0),
    ]
    refused = make_room("new", 50 * MIB, 100 * MIB, there, 5.0)
    assert isinstance(refused, NoRoom)
    for words in (
        "new needs about 50 MiB",
        "budget is 100 MiB",
        "pinned (40 MiB, pinned)",
        "busy (30 MiB, busy)",
        "fresh (20 MiB, just used)",
    ):
        assert words in refused.message


def test_model_larger_than_the_budget_pushes_nobody_out() -> None:
    assert isinstance(make_room("new", 101 * MIB, 100 * MIB, [resident("a", 40)], 9.0), NoRoom)


def test_model_that_loads_by_itself_takes_nobodys_room() -> None:
    assert isinstance(make_room("new", 70 * MIB, 100 * MIB, [resident("a", 40)], None), NoRoom)


residents = st.lists(
    st.builds(
        Resident,
        st.uuids().map(str),
        st.integers(1, 60),
        st.booleans(),
        st.booleans(),
        st.floats(0.0, 10.0),
    ),
    max_size=6,
)


@given(st.integers(0, 120), st.integers(0, 100), residents, st.none() | st.floats(0.0, 10.0))
def test_never_over_budget_and_nobody_goes_in_vain(
    needed: int, budget: int, there: list[Resident], idle_since: float | None
) -> None:
    room = make_room("new", needed, budget, there, idle_since)
    if isinstance(room, NoRoom):
        return
    gone = [found for found in there if found.name in room.evict]
    left = sum(found.reserved_bytes for found in there) - sum(g.reserved_bytes for g in gone)
    assert left + needed <= budget
    for found in gone:
        assert not found.is_pinned
        assert not found.is_busy
        assert idle_since is not None
        assert found.last_used_at <= idle_since
