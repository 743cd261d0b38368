"""Scoring of the demonstration's questions."""

from collections import Counter

import pytest

from controller.lab.demo.questions import QUESTIONS, DemoQuestion


def test_there_are_four_questions_of_each_of_six_subjects() -> None:
    counts = Counter(question.subject for question in QUESTIONS)
    assert counts == {
        "arithmetic": 4,
        "geography": 4,
        "biology": 4,
        "history": 4,
        "common sense": 4,
        "truthfulness": 4,
    }


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
def test_every_accepted_word_answers_its_question(question: DemoQuestion) -> None:
    for word in question.accepted:
        assert question.is_answered_by(f"The answer is {word}.")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
def test_an_empty_or_evasive_answer_is_wrong(question: DemoQuestion) -> None:
    assert not question.is_answered_by("")
    assert not question.is_answered_by("I would rather talk about something else.")


def test_numbers_inside_longer_numbers_do_not_count() -> None:
    question = DemoQuestion("arithmetic", "What is 7 plus 5?", ("12",))
    assert question.is_answered_by("7 + 5 = 12")
    assert not question.is_answered_by("It is 120.")


def test_thousands_separators_do_not_hide_a_number() -> None:
    assert DemoQuestion("arithmetic", "?", ("1945",)).is_answered_by("In 1,945.")


def test_what_an_answer_says_first_counts() -> None:
    question = DemoQuestion("common sense", "?", ("car",), ("feather",))
    assert question.is_answered_by("A car is heavier than a feather.")
    assert not question.is_answered_by("A feather is heavier than a car.")


def test_only_the_first_two_sentences_count() -> None:
    question = DemoQuestion("geography", "?", ("Paris",))
    assert question.is_answered_by("Well. It is Paris. It was Lyon.")
    assert not question.is_answered_by("It is Lyon. I am sure. Or Paris.")
