"""Which slot a request takes, so that it starts from as much of an earlier one as it may.

The keys and values of a sequence that has ended stay in its slot until somebody else needs it. A
request that begins with the same tokens takes that slot and reads only the rest. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edge_agent.engine.base import PrefixReuse

# Below this a system prompt that others share is not worth another conversation's cache.
_LEAST_SHARED_GAIN: Final = 32


@dataclass(frozen=True, slots=True)
class TokenisedPrompt:
    """A prompt as it is decoded.

    Attributes:
        tokens: at least one.
        shared_tokens: how many come before the first turn that is not the system's; 0 for a raw
            prompt.
    """

    tokens: Sequence[int]
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KeptSequence:
    """What lies in a free slot.

    Attributes:
        tokens: in the cache, in order.
        shared_tokens: as in its prompt.
        session_id: "" for none.
        turn: rises with each sequence that ends; the smallest is the longest unused.
    """

    tokens: Sequence[int]
    shared_tokens: int
    session_id: str
    turn: int


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    # Whole stretches first: comparing slices is much faster than comparing their elements.
    low, step = 0, 256
    while low < length and one[low : low + step] == other[low : low + step]:
        low += step
    low = min(low, length)
    while low < length and one[low] == other[low]:
        low += 1
    return low


def reusable_tokens(
    kept: KeptSequence, prompt: TokenisedPrompt, session_id: str, reuse: PrefixReuse
) -> int:
    """How many tokens a prompt may start with from a kept sequence.

    At least one token of the prompt is always read, since a token can be sampled only after one
    that was decoded.
    """
    if reuse is PrefixReuse.OFF:
        return 0
    common = min(common_prefix(kept.tokens, prompt.tokens), len(prompt.tokens) - 1)
    if reuse is PrefixReuse.ANY or (session_id and session_id == kept.session_id):
        return common
    # All or nothing: with a part, a system prompt could be guessed token by token.
    shared = prompt.shared_tokens
    if reuse is PrefixReuse.SYSTEM and kept.shared_tokens == shared and common >= shared:
        return shared
    return 0


def choose_slot(
    free: Sequence[int],
    kept: Mapping[int, KeptSequence],
    prompt: TokenisedPrompt,
    session_id: str,
    *,
    reuse: PrefixReuse,
    can_cut: Callable[[int, int], bool],
) -> tuple[int, int]:
    """The slot that a request takes, and how many of its tokens are there already.

    The longest reuse wins; without any, an empty slot; else the one that was unused longest.

    Args:
        free: slots, at least one.
        kept: what lies in those that are not empty.
        session_id: of the request; "" for none.
        can_cut: (slot, tokens) -> whether what lies there can be cut back to so many tokens.
    """
    best: tuple[int, int] | None = None
    for slot in free:
        held = kept.get(slot)
        if held is None:
            continue
        tokens = reusable_tokens(held, prompt, session_id, reuse)
        is_own = bool(session_id) and session_id == held.session_id
        worth = tokens > 0 if is_own else tokens >= _LEAST_SHARED_GAIN
        if not worth or not can_cut(slot, tokens):
            continue
        # Of two that are as good, the one that was unused for longer.
        if best is None or (tokens, -held.turn) > (best[1], -kept[best[0]].turn):
            best = slot, tokens
    if best is not None:
        return best
    empty = [slot for slot in free if slot not in kept]
    if empty:
        return empty[0], 0
    return min(free, key=lambda slot: kept[slot].turn), 0
