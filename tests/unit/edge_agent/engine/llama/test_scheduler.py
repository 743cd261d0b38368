from hypothesis import given
from hypothesis import strategies as st

from edge_agent.engine.llama.scheduler import (
    FIRST_BUDGET_TOKENS,
    MIN_BUDGET_TOKENS,
    Pace,
    WaitingSequence,
    admit,
    closing_move,
    plan_step,
)
from edge_agent.engine.llama.slots import SlotTable

CONTEXT_TOKENS = 1024


@st.composite
def tables(draw: st.DrawFn) -> SlotTable:
    table = SlotTable.empty(draw(st.integers(1, 6)), CONTEXT_TOKENS)
    for number in range(draw(st.integers(0, len(table.sequences)))):
        prompt = draw(st.integers(1, 600))
        table, slot = table.claim(f"r{number}", prompt, 50)
        read = draw(st.integers(0, prompt))
        if read:
            table = table.read(slot, read)
        if read == prompt:
            table = table.answer(slot)
    return table


@given(table=tables(), budget=st.integers(1, 500), can_postpone=st.booleans())
def test_a_step_decodes_everyone_who_can_and_reads_within_its_budget(
    table: SlotTable, budget: int, can_postpone: bool
) -> None:
    plan = plan_step(table, budget, can_postpone)
    active = dict(table.active)
    assert set(plan.decodes) == {slot for slot, s in active.items() if not s.is_reading}
    read = sum(prefill.count for prefill in plan.prefills)
    ending = sum(prefill.count for prefill in plan.prefills if prefill.is_last)
    unread = sum(s.unread_tokens for s in active.values())
    assert read <= budget
    others = 0 if can_postpone else max(ending, MIN_BUDGET_TOKENS)
    assert read == min(budget, unread) or (ending and read == ending + others)
    assert plan.tokens == read + len(plan.decodes)
    for prefill in plan.prefills:
        sequence = active[prefill.slot]
        assert prefill.count > 0
        assert prefill.start == sequence.read_tokens
        assert prefill.is_last == (prefill.count == sequence.unread_tokens)


@given(table=tables(), budget=st.integers(1, 500))
def test_the_prompt_that_is_here_longest_advances_in_every_second_step(
    table: SlotTable, budget: int
) -> None:
    """R17."""
    reading = [(slot, s) for slot, s in table.active if s.is_reading]
    if reading:
        slot, oldest = reading[0]
        plan = plan_step(table, budget)
        assert plan.has_postponed == (slot not in {prefill.slot for prefill in plan.prefills})
        if plan.has_postponed:
            plan = plan_step(table, budget, can_postpone=False)
        counts = {prefill.slot: prefill.count for prefill in plan.prefills}
        read = sum(counts.values())
        assert counts[slot] >= min(oldest.unread_tokens, max(1, read // 4))


def test_a_short_prompt_is_not_held_up_by_a_long_one() -> None:
    table, _ = SlotTable.empty(2, CONTEXT_TOKENS).claim("long", 900, 10)
    table, short = table.claim("short", 40, 10)
    prefills = {prefill.slot: prefill for prefill in plan_step(table, 64).prefills}
    assert prefills[short].is_last


def test_a_prompt_that_ends_does_not_wait_for_more_of_a_long_one() -> None:
    table, long = SlotTable.empty(2, CONTEXT_TOKENS).claim("long", 900, 10)
    table, short = table.claim("short", 40, 10)
    for can_postpone, expected in (True, {short: 40}), (False, {long: 40, short: 40}):
        plan = plan_step(table, 400, can_postpone)
        assert {prefill.slot: prefill.count for prefill in plan.prefills} == expected


def test_an_idle_table_has_an_empty_plan() -> None:
    assert plan_step(SlotTable.empty(2, CONTEXT_TOKENS), 64).tokens == 0


def test_slots_are_given_in_the_order_of_waiting() -> None:
    waiting = [WaitingSequence(name, 5, 5) for name in "abc"]
    table, admitted = admit(SlotTable.empty(2, CONTEXT_TOKENS), waiting)
    assert admitted == (("a", 0), ("b", 1))
    table = table.release(0)
    _, admitted = admit(table, waiting[2:])
    assert admitted == (("c", 0),)


def test_an_unknown_pace_begins_with_a_small_step() -> None:
    assert Pace().budget(False, 512) == FIRST_BUDGET_TOKENS
    assert Pace().budget(True, 8) == 8


@given(rate=st.floats(0.01, 1e6), has_decoders=st.booleans(), batch=st.integers(1, 4096))
def test_a_budget_is_always_possible(rate: float, has_decoders: bool, batch: int) -> None:
    assert 1 <= Pace(rate).budget(has_decoders, batch) <= batch


def test_a_step_is_shorter_while_others_wait_for_their_next_token() -> None:
    pace = Pace(1000.0)
    assert MIN_BUDGET_TOKENS <= pace.budget(True, 512) < pace.budget(False, 512)
    assert pace.budget(False, 512, share_ratio=0.25) < pace.budget(False, 512) / 2


def test_the_pace_follows_what_was_measured() -> None:
    pace = Pace().after(100, 1.0)
    assert pace.tokens_per_second == 100.0
    for _ in range(30):
        pace = pace.after(50, 1.0)
    assert pace.tokens_per_second is not None
    assert 49.9 < pace.tokens_per_second < 51.0
    assert pace.after(MIN_BUDGET_TOKENS - 1, 5.0) is pace
    assert pace.after(100, 0.0) is pace


def test_whoever_waits_takes_the_slot_that_is_chosen_for_it() -> None:
    waiting = [WaitingSequence(name, 5, 5) for name in "ab"]
    table, admitted = admit(
        SlotTable.empty(3, CONTEXT_TOKENS),
        waiting,
        lambda key, free: (free[-1], 4 if key == "b" else 0),
    )
    assert admitted == (("a", 2), ("b", 1))
    assert table.occupant(1).unread_tokens == 1


@given(busy=st.sets(st.integers(0, 9)))
def test_moves_bring_busy_slots_together_and_come_to_an_end(busy: set[int]) -> None:
    table = SlotTable.empty(10, CONTEXT_TOKENS)
    for slot in busy:
        table, _ = table.claim(f"r{slot}", 5, 5, slot)
    moves = 0
    while (move := closing_move(table)) is not None:
        table = table.moved(*move)
        moves += 1
        assert moves <= len(busy) / 2 + 1
    slots = sorted(slot for slot, _ in table.active)
    assert len(slots) == len(busy)
    assert not slots or slots[-1] - slots[0] == len(slots) - 1
