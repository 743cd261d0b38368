"""Plans one step of continuous batching: who is admitted, what is read, who decodes.

Every step decodes one token of each sequence whose prompt has been read, and reads a limited
number of prompt tokens alongside in the same call, so that a long prompt slows the others down
but never stops them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from edge_agent.engine.llama.slots import SlotTable

# How long one step may last, roughly: what a reader notices between two tokens of its answer,
# and, with nobody waiting for tokens, how long a cancel or a newcomer may have to wait.
STEP_SECONDS_WITH_DECODERS: Final = 0.15
STEP_SECONDS_ALONE: Final = 0.4
# Until a rate is known: short enough for a device that reads 30 tokens a second.
FIRST_BUDGET_TOKENS: Final = 32
MIN_BUDGET_TOKENS: Final = 16
# The longest-waiting prompt gets this share of at least every second step, whatever else arrives,
# so it cannot starve.
OLDEST_SHARE_RATIO: Final = 0.25
_PACE_WEIGHT: Final = 0.3


@dataclass(frozen=True, slots=True)
class WaitingSequence:
    """A request with no slot yet."""

    key: str
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt tokens [start, start + count) of one slot, read in this step."""

    slot: int
    start: int
    count: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What goes into one call of the decoder; slots in `decodes` get one token each.

    `has_postponed` is whether the prompt that has been here longest is left out.
    """

    prefills: tuple[Prefill, ...]
    decodes: tuple[int, ...]
    has_postponed: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the whole step."""
        return len(self.decodes) + sum(prefill.count for prefill in self.prefills)


@dataclass(frozen=True, slots=True)
class Pace:
    """How many prompt tokens a second this machine reads, as far as it is known."""

    tokens_per_second: float | None = None

    def after(self, tokens: int, seconds: float) -> "Pace":
        """Learn from a step that read a prompt."""
        if tokens < MIN_BUDGET_TOKENS or seconds <= 0:
            return self  # too small to tell the rate from the overhead
        rate = tokens / seconds
        if self.tokens_per_second is None:
            return Pace(rate)
        return Pace(self.tokens_per_second + _PACE_WEIGHT * (rate - self.tokens_per_second))

    def budget(self, has_decoders: bool, batch_tokens: int, share_ratio: float = 1.0) -> int:
        """Prompt tokens that the next step may read so that it does not last too long.

        Args:
            has_decoders: whether someone waits for the next token of an answer.
            batch_tokens: the most that one call of the decoder takes.
            share_ratio: of the time, spent in steps; a rest follows each, so steps are shorter.
        """
        if self.tokens_per_second is None:
            return min(FIRST_BUDGET_TOKENS, batch_tokens)
        seconds = STEP_SECONDS_WITH_DECODERS if has_decoders else STEP_SECONDS_ALONE
        wanted = int(self.tokens_per_second * seconds * share_ratio)
        return max(1, min(max(wanted, MIN_BUDGET_TOKENS), batch_tokens))


def first_free(_key: str, free: Sequence[int]) -> tuple[int, int]:
    """Choose the first free slot, and nothing in it."""
    return free[0], 0


def admit(
    table: SlotTable,
    waiting: Iterable[WaitingSequence],
    choose: Callable[[str, Sequence[int]], tuple[int, int]] = first_free,
) -> tuple[SlotTable, tuple[tuple[str, int], ...]]:
    """Give free slots to those who wait, in their order.

    Args:
        choose: (key, free slots) -> the slot that it takes, and how many tokens of its prompt
            are in that slot's cache already.

    Returns:
        the new table, and (key, slot) of each request that got one.
    """
    admitted = []
    for request in waiting:
        if not table.free:
            break
        slot, reused = choose(request.key, table.free)
        table, slot = table.claim(
            request.key, request.prompt_tokens, request.max_tokens, slot, reused
        )
        admitted.append((request.key, slot))
    return table, tuple(admitted)


def closing_move(table: SlotTable) -> tuple[int, int] | None:
    """The next move that brings the busy slots closer to lying side by side.

    llama.cpp decodes neighbouring sequences in one pass over the weights, and needs a further
    pass behind each gap. Measured with 4 of 8 slots busy, every other one: two thirds of the
    tokens a second.

    Returns:
        (busy slot, free slot) to change places; None when they are side by side.
    """
    busy = [slot for slot, held in enumerate(table.sequences) if held is not None]
    count = len(busy)
    if count < 2 or busy[-1] - busy[0] == count - 1:
        return None
    starts = range(len(table.sequences) - count + 1)
    start = max(starts, key=lambda start: sum(start <= slot < start + count for slot in busy))
    outside = next(slot for slot in busy if not start <= slot < start + count)
    inside = next(slot for slot in range(start, start + count) if slot not in busy)
    return outside, inside


def plan_step(table: SlotTable, budget_tokens: int, can_postpone: bool = True) -> StepPlan:
    """Plan one step; an empty plan means that nobody is active.

    Shorter remainders are read first, since they give the most requests an early first token;
    the prompt that has been in its slot longest gets its share before that. A prompt that ends
    waits for its first token until the whole step is done, so that the others are left out of
    such a step, or read no further than those that end where that was done in the step before.

    Args:
        table: the slots now.
        budget_tokens: prompt tokens that may be read, at least 1.
        can_postpone: whether the oldest prompt may be left out; False after a step that did it.
    """
    decodes = tuple(slot for slot, sequence in table.active if not sequence.is_reading)
    reading = [(slot, sequence) for slot, sequence in table.active if sequence.is_reading]
    if not reading:
        return StepPlan((), decodes)
    budget = max(1, budget_tokens)
    counts = dict.fromkeys((slot for slot, _ in reading), 0)
    oldest_slot, oldest = reading[0]
    counts[oldest_slot] = min(oldest.unread_tokens, max(1, int(budget * OLDEST_SHARE_RATIO)))
    budget -= counts[oldest_slot]
    ending = 0
    for slot, sequence in sorted(reading, key=lambda item: item[1].unread_tokens):
        more = min(sequence.unread_tokens - counts[slot], budget)
        counts[slot] += more
        budget -= more
        if counts[slot] == sequence.unread_tokens:
            ending += counts[slot]
    if ending:
        allowed = 0 if can_postpone else max(ending, MIN_BUDGET_TOKENS)
        for slot, sequence in reading:  # the oldest first
            if counts[slot] < sequence.unread_tokens:
                counts[slot] = min(counts[slot], allowed)
                allowed -= counts[slot]
    prefills = tuple(
        Prefill(slot, sequence.read_tokens, count, is_last=count == sequence.unread_tokens)
        for slot, sequence in reading
        if (count := counts[slot]) > 0
    )
    return StepPlan(prefills, decodes, has_postponed=counts[oldest_slot] == 0)
