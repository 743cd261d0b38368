import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_agent.engine.llama.slots import SlotTable

CONTEXT_TOKENS = 16


def test_a_claim_takes_the_first_free_slot() -> None:
    table = SlotTable.empty(2, CONTEXT_TOKENS)
    table, first = table.claim("a", 3, 5)
    table, second = table.claim("b", 3, 5)
    assert (first, second) == (0, 1)
    assert not table.free
    table = table.release(0)
    table, third = table.claim("c", 3, 5)
    assert third == 0
    assert [sequence.key for _, sequence in table.active] == ["b", "c"]


def test_the_cache_holds_the_prompt_and_all_but_the_last_token() -> None:
    table, slot = SlotTable.empty(1, CONTEXT_TOKENS).claim("a", 3, 5)
    seen = [table.occupant(slot).cached_tokens]
    table = table.read(slot, 2)
    seen.append(table.occupant(slot).cached_tokens)
    table = table.read(slot, 1)
    for _ in range(3):
        seen.append(table.occupant(slot).cached_tokens)
        table = table.answer(slot)
    assert seen == [0, 2, 3, 3, 4]


@given(prompt=st.integers(1, CONTEXT_TOKENS - 1), wanted=st.integers(1, 100))
def test_prompt_and_answer_never_exceed_the_context(prompt: int, wanted: int) -> None:
    table, slot = SlotTable.empty(1, CONTEXT_TOKENS).claim("a", prompt, wanted)
    table = table.read(slot, prompt)
    while not table.occupant(slot).is_full:
        table = table.answer(slot)
    answer = table.occupant(slot).answer_tokens
    assert answer == min(wanted, CONTEXT_TOKENS - prompt)
    with pytest.raises(ValueError, match="no token"):
        table.answer(slot)


@pytest.mark.parametrize("prompt", [0, CONTEXT_TOKENS, CONTEXT_TOKENS + 1])
def test_a_prompt_that_leaves_no_room_is_refused(prompt: int) -> None:
    table = SlotTable.empty(1, CONTEXT_TOKENS)
    assert not table.fits(prompt)
    with pytest.raises(ValueError, match="must fit"):
        table.claim("a", prompt, 1)


def test_misuse_is_refused() -> None:
    table, slot = SlotTable.empty(2, CONTEXT_TOKENS).claim("a", 3, 1)
    with pytest.raises(ValueError, match="has a slot"):
        table.claim("a", 3, 1)
    with pytest.raises(ValueError, match="cannot be read"):
        table.read(slot, 4)
    with pytest.raises(ValueError, match="no token"):
        table.answer(slot)
    with pytest.raises(ValueError, match="is free"):
        table.release(1)
    with pytest.raises(ValueError, match="needs a slot"):
        SlotTable.empty(0, CONTEXT_TOKENS)
    table, _ = table.claim("b", 3, 1)
    with pytest.raises(ValueError, match="every slot"):
        table.claim("c", 3, 1)


def test_a_claim_may_name_its_slot_and_what_is_in_it() -> None:
    table, slot = SlotTable.empty(3, CONTEXT_TOKENS).claim("a", 5, 5, slot=2, reused_tokens=3)
    assert slot == 2
    held = table.occupant(2)
    assert (held.reused_tokens, held.read_tokens, held.unread_tokens) == (3, 3, 2)
    with pytest.raises(ValueError, match="slot 2 is busy"):
        table.claim("b", 5, 5, slot=2)
    with pytest.raises(ValueError, match="must be read"):
        table.claim("b", 5, 5, slot=1, reused_tokens=5)


def test_a_sequence_moves_with_all_its_counts() -> None:
    table, _ = SlotTable.empty(3, CONTEXT_TOKENS).claim("a", 5, 5)
    held = table.read(0, 5).answer(0).occupant(0)
    moved = table.read(0, 5).answer(0).moved(0, 2)
    assert moved.occupant(2) == held
    assert moved.free == [0, 1]
    with pytest.raises(ValueError, match="slot 2 is busy"):
        moved.claim("b", 5, 5)[0].moved(0, 2)


class SlotMachine(RuleBasedStateMachine):
    """Any order of claims, reads, answers and releases keeps the counts right."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable.empty(3, CONTEXT_TOKENS)
        self.number = 0

    def pick(self, choice: int) -> int:
        active = self.table.active
        return active[choice % len(active)][0]

    @precondition(lambda self: self.table.free)
    @rule(prompt=st.integers(1, CONTEXT_TOKENS - 1), wanted=st.integers(1, 20))
    def claim(self, prompt: int, wanted: int) -> None:
        self.number += 1
        self.table, slot = self.table.claim(f"r{self.number}", prompt, wanted)
        assert self.table.occupant(slot).key == f"r{self.number}"

    @precondition(lambda self: self.table.active)
    @rule(choice=st.integers(0, 2), part=st.integers(1, CONTEXT_TOKENS))
    def advance(self, choice: int, part: int) -> None:
        slot = self.pick(choice)
        held = self.table.occupant(slot)
        if held.is_reading:
            self.table = self.table.read(slot, min(part, held.unread_tokens))
        elif not held.is_full:
            self.table = self.table.answer(slot)

    @precondition(lambda self: self.table.active)
    @rule(choice=st.integers(0, 2))
    def release(self, choice: int) -> None:
        self.table = self.table.release(self.pick(choice))

    @invariant()
    def no_cell_is_used_twice(self) -> None:
        assert len(self.table.free) + len(self.table.active) == 3
        turns = [sequence.turn for _, sequence in self.table.active]
        assert turns == sorted(set(turns))
        for _, sequence in self.table.active:
            assert 0 <= sequence.cached_tokens < CONTEXT_TOKENS


TestSlotMachine = SlotMachine.TestCase
