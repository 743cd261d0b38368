import numpy as np
import pytest

from controller.predictors.features import (
    STRUCTURE_NAMES,
    class_probabilities,
    profile_query,
    structures,
    syntactic_complexity,
)


def test_a_prompt_is_counted():
    found = profile_query("The cat sat. The CAT ran, because it could!\nWhy?")
    assert (found.prompt_words, found.prompt_sentences, found.prompt_characters) == (10, 3, 48)
    assert found.lexical_diversity_ratio == 8 / 10
    assert found.prompt_tokens == 12
    assert 0 < found.syntactic_complexity_ratio < 1


@pytest.mark.parametrize("text", ["", " \n", "...", "?!"])
def test_a_prompt_without_words_has_no_diversity_and_one_sentence(text):
    found = profile_query(text)
    assert (found.prompt_words, found.prompt_sentences, found.prompt_tokens) == (0, 1, 1)
    assert (found.lexical_diversity_ratio, found.syntactic_complexity_ratio) == (0.0, 0.0)


def test_the_callers_tokens_are_kept():
    assert profile_query("a b c", prompt_tokens=77).prompt_tokens == 77


def test_complexity_rises_with_each_of_its_signs():
    base = syntactic_complexity(20, 2, 2, 90)
    assert syntactic_complexity(20, 1, 2, 90) > base
    assert syntactic_complexity(20, 2, 6, 90) > base
    assert syntactic_complexity(20, 2, 2, 140) > base
    involved = profile_query(
        "The committee, which had convened because the amendment was contested, adjourned."
    )
    plain = profile_query("The dog ran. The dog sat. It was hot. We went in.")
    assert involved.syntactic_complexity_ratio > plain.syntactic_complexity_ratio


def test_queries_are_stacked_and_unclassified_ones_may_be_of_any_class():
    sure = profile_query("a", class_probabilities=np.array([1.0, 0.0]))
    assert structures([sure, profile_query("b c")]).shape == (2, len(STRUCTURE_NAMES))
    assert structures([]).shape == (0, len(STRUCTURE_NAMES))
    assert class_probabilities([sure, profile_query("b")], 2).tolist() == [[1, 0], [0.5, 0.5]]
    with pytest.raises(ValueError, match=r"2 class probabilities, but .* 3 classes"):
        class_probabilities([sure], 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0, 0, 1, 0.0)),
        ("Hello hello, world.", (19, 3, 1, pytest.approx(2 / 3))),
        ("One. Two!\n\nThree 3.5?", (21, 5, 3, 1.0)),
    ],
)
def test_features_of_a_prompt(text: str, expected: tuple[object, ...]) -> None:
    found = profile_query(text)
    assert (
        found.prompt_characters,
        found.prompt_words,
        found.prompt_sentences,
        found.lexical_diversity_ratio,
    ) == expected
