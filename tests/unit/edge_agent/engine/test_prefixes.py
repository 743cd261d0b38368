import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.engine.base import PrefixReuse
from edge_agent.engine.prefixes import (
    KeptSequence,
    TokenisedPrompt,
    choose_slot,
    common_prefix,
    reusable_tokens,
)

SYSTEM = list(range(100, 150))


@given(
    prefix=st.lists(st.integers(0, 3), max_size=700),
    one=st.lists(st.integers(0, 3), max_size=9),
    other=st.lists(st.integers(0, 3), max_size=9),
)
def test_the_common_prefix_is_the_longest(
    prefix: list[int], one: list[int], other: list[int]
) -> None:
    first, second = prefix + one, prefix + other
    length = common_prefix(first, second)
    assert first[:length] == second[:length]
    assert length >= len(prefix)
    assert length in (len(first), len(second)) or first[length] != second[length]


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(
    kept=st.builds(
        KeptSequence, tokens, st.integers(0, 9), st.sampled_from(["", "a", "b"]), st.just(0)
    ),
    prompt=st.builds(TokenisedPrompt, tokens, st.integers(0, 9)),
    session_id=st.sampled_from(["", "a", "b"]),
    reuse=st.sampled_from(PrefixReuse),
)
def test_nothing_but_an_identical_beginning_is_ever_reused(
    kept: KeptSequence, prompt: TokenisedPrompt, session_id: str, reuse: PrefixReuse
) -> None:
    prompt = TokenisedPrompt(prompt.tokens, min(prompt.shared_tokens, len(prompt.tokens) - 1))
    count = reusable_tokens(kept, prompt, session_id, reuse)
    assert 0 <= count < len(prompt.tokens)
    assert prompt.tokens[:count] == kept.tokens[:count]
    if reuse is PrefixReuse.OFF:
        assert count == 0
    is_own = bool(session_id) and session_id == kept.session_id
    if reuse is PrefixReuse.SESSION and not is_own:
        assert count == 0
    if reuse is PrefixReuse.SYSTEM and not is_own:
        assert count in (0, prompt.shared_tokens)


def test_a_system_prompt_of_others_is_reused_whole_or_not_at_all() -> None:
    """A client that guesses another one's system prompt must learn nothing from a part of it."""
    kept = KeptSequence([*SYSTEM, 1, 2, 3], len(SYSTEM), "a", 0)
    whole = TokenisedPrompt([*SYSTEM, 9, 9], len(SYSTEM))
    guess = TokenisedPrompt([*SYSTEM[:49], 0, 9, 9], len(SYSTEM))
    shorter = TokenisedPrompt([*SYSTEM[:30], 9, 9], 30)
    found = [
        reusable_tokens(kept, prompt, "b", PrefixReuse.SYSTEM) for prompt in (whole, guess, shorter)
    ]
    assert found == [len(SYSTEM), 0, 0]


@pytest.mark.parametrize("session_id", ["", "b"])
def test_no_session_is_nobodys_session(session_id: str) -> None:
    kept = KeptSequence([1, 2, 3], 0, "", 0)
    assert reusable_tokens(kept, TokenisedPrompt([1, 2, 3, 4]), session_id, PrefixReuse.SYSTEM) == 0


def choose(prompt: TokenisedPrompt, session_id: str, kept: dict[int, KeptSequence]) -> object:
    return choose_slot(
        [0, 1, 2], kept, prompt, session_id, reuse=PrefixReuse.SYSTEM, can_cut=lambda *_: True
    )


def test_a_turn_goes_where_its_session_is() -> None:
    kept = {
        1: KeptSequence([*SYSTEM, 1, 2, 3], len(SYSTEM), "a", 7),
        2: KeptSequence([*SYSTEM, 5, 6], len(SYSTEM), "b", 8),
    }
    prompt = TokenisedPrompt([*SYSTEM, 1, 2, 3, 4], len(SYSTEM))
    assert choose(prompt, "a", kept) == (1, len(SYSTEM) + 3)
    # Another conversation with the same system prompt starts from it where it was left longest.
    assert choose(prompt, "c", kept) == (1, len(SYSTEM))


def test_without_reuse_an_empty_slot_is_taken_and_then_the_longest_unused() -> None:
    kept = {
        0: KeptSequence([1, 2], 0, "a", 5),
        1: KeptSequence([1, 2], 0, "b", 3),
    }
    prompt = TokenisedPrompt([7, 8, 9])
    assert choose(prompt, "c", kept) == (2, 0)
    kept[2] = KeptSequence([1, 2], 0, "d", 4)
    assert choose(prompt, "c", kept) == (1, 0)


def test_a_few_shared_tokens_are_not_worth_anothers_conversation() -> None:
    kept = {0: KeptSequence([*range(400)], 10, "a", 5)}
    prompt = TokenisedPrompt([*range(10), 999, 999], 10)
    assert choose(prompt, "b", kept) == (1, 0)


def test_a_sequence_that_cannot_be_cut_is_continued_or_left_alone() -> None:
    kept = {0: KeptSequence([1, 2, 3], 0, "a", 0)}
    for tokens, expected in (([1, 2, 3, 4], (0, 3)), ([1, 2, 9, 9], (1, 0))):
        found = choose_slot(
            [0, 1],
            kept,
            TokenisedPrompt(tokens),
            "a",
            reuse=PrefixReuse.SYSTEM,
            can_cut=lambda slot, length: length == len(kept[slot].tokens),
        )
        assert found == expected
