"""Slot and KV-cache accounting of one engine: who decodes where, and how full each cache is.

A slot is one sequence that is decoded together with the others; it owns `context_tokens` cells
of the KV cache. What a sequence leaves there is kept for the next one (see `prefixes`). The token
that was sampled last is not in the cache yet: it goes in with the step that decodes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ActiveSequence:
    """One request in its slot.

    Attributes:
        turn: rises with each claim; a smaller one has been here longer.
        prompt_tokens: of the whole prompt, at least 1.
        answer_limit: tokens after which the answer must end, at least 1.
        reused_tokens: prompt tokens that were in the slot's cache when it was claimed.
        read_tokens: prompt tokens in the KV cache.
        answer_tokens: tokens sampled so far.
    """

    key: str
    turn: int
    prompt_tokens: int
    answer_limit: int
    reused_tokens: int = 0
    read_tokens: int = 0
    answer_tokens: int = 0

    @property
    def unread_tokens(self) -> int:
        """Prompt tokens still to be read."""
        return self.prompt_tokens - self.read_tokens

    @property
    def is_reading(self) -> bool:
        """Whether the prompt is still being read."""
        return self.unread_tokens > 0

    @property
    def cached_tokens(self) -> int:
        """Cells of the KV cache in use; the position where the next token goes."""
        return self.read_tokens + max(0, self.answer_tokens - 1)

    @property
    def is_full(self) -> bool:
        """Whether no further token may be sampled."""
        return self.answer_tokens >= self.answer_limit


@dataclass(frozen=True, slots=True)
class SlotTable:
    """All slots of one engine; every method returns a new table.

    Attributes:
        context_tokens: cells of one slot, prompt and answer together.
        sequences: the occupant of each slot, by slot index; None is free.
        turns: claims so far.
    """

    context_tokens: int
    sequences: tuple[ActiveSequence | None, ...]
    turns: int = 0

    @classmethod
    def empty(cls, slots: int, context_tokens: int) -> "SlotTable":
        """A table with every slot free."""
        if slots < 1 or context_tokens < 2:
            raise ValueError("an engine needs a slot, and room for a prompt and an answer")
        return cls(context_tokens, (None,) * slots)

    @property
    def free(self) -> Sequence[int]:
        """Indices of the free slots, ascending."""
        return [index for index, held in enumerate(self.sequences) if held is None]

    @property
    def active(self) -> Sequence[tuple[int, ActiveSequence]]:
        """Busy slots with their occupants, the longest-serving first."""
        held = [(i, s) for i, s in enumerate(self.sequences) if s is not None]
        return sorted(held, key=lambda item: item[1].turn)

    def fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt leaves room for at least one token of an answer."""
        return 0 < prompt_tokens < self.context_tokens

    def claim(
        self,
        key: str,
        prompt_tokens: int,
        max_tokens: int,
        slot: int | None = None,
        reused_tokens: int = 0,
    ) -> "tuple[SlotTable, int]":
        """Give a request a free slot, the first one unless it names another.

        Args:
            reused_tokens: how many of its prompt are in that slot's cache already.

        Raises:
            ValueError: no slot or not this one is free, the key has one already, the prompt does
                not fit, or nothing of it would be left to read.
        """
        if not self.free:
            raise ValueError("every slot is busy")
        if slot is None:
            slot = self.free[0]
        if self.sequences[slot] is not None:
            raise ValueError(f"slot {slot} is busy")
        if any(held is not None and held.key == key for held in self.sequences):
            raise ValueError(f"{key!r} has a slot already")
        if not self.fits(prompt_tokens) or max_tokens < 1:
            raise ValueError("the prompt and one token of an answer must fit")
        if not 0 <= reused_tokens < prompt_tokens:
            raise ValueError("at least one token of a prompt must be read")
        limit = min(max_tokens, self.context_tokens - prompt_tokens)
        held = ActiveSequence(
            key, self.turns, prompt_tokens, limit, reused_tokens, read_tokens=reused_tokens
        )
        table = self._with(slot, held)
        return replace(table, turns=self.turns + 1), slot

    def read(self, slot: int, tokens: int) -> "SlotTable":
        """Count prompt tokens that went into the cache."""
        held = self.occupant(slot)
        if not 0 < tokens <= held.unread_tokens:
            raise ValueError(f"{tokens} tokens cannot be read of {held.unread_tokens}")
        return self._with(slot, replace(held, read_tokens=held.read_tokens + tokens))

    def answer(self, slot: int) -> "SlotTable":
        """Count one sampled token."""
        held = self.occupant(slot)
        if held.is_reading or held.is_full:
            raise ValueError("no token may be sampled here")
        return self._with(slot, replace(held, answer_tokens=held.answer_tokens + 1))

    def release(self, slot: int) -> "SlotTable":
        """Free a busy slot."""
        self.occupant(slot)
        return self._with(slot, None)

    def moved(self, source: int, target: int) -> "SlotTable":
        """Move a sequence to a free slot; its cache is for the caller to move."""
        held = self.occupant(source)
        if self.sequences[target] is not None:
            raise ValueError(f"slot {target} is busy")
        return self._with(source, None)._with(target, held)

    def occupant(self, slot: int) -> ActiveSequence:
        """Who is in a slot.

        Raises:
            ValueError: nobody.
        """
        held = self.sequences[slot]
        if held is None:
            raise ValueError(f"slot {slot} is free")
        return held

    def _with(self, slot: int, held: ActiveSequence | None) -> "SlotTable":
        return replace(self, sequences=(*self.sequences[:slot], held, *self.sequences[slot + 1 :]))
