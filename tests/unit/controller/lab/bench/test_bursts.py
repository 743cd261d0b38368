import pytest

from controller.domain.request import ChatMessage
from controller.lab.bench.bursts import Round, built_in_rounds, question_rounds
from controller.lab.offline.graders import Grader, Key
from controller.lab.offline.questions import Question


def question(number: int, max_tokens: int | None = None) -> Question:
    messages = (ChatMessage("user", f"What is {number}?"),)
    return Question("own", str(number), "own", messages, Key(Grader.EXACT, ("1",)), max_tokens)


QUESTIONS = [question(number) for number in range(100)]


def texts(rounds: list[Round]) -> list[str]:
    return [
        one.chat.messages[0].content for both in rounds for one in (*both.burst, *both.follower)
    ]


@pytest.mark.parametrize(
    "make",
    [built_in_rounds, lambda rounds, seed: question_rounds(QUESTIONS, rounds, seed, 64)],
    ids=["built-in", "questions"],
)
def test_rounds_are_the_same_for_the_same_seed_and_every_third_is_followed(make) -> None:  # type: ignore[no-untyped-def]
    first, again, other = make(6, 1), make(6, 1), make(6, 2)
    assert first == again
    assert first != other
    assert all(1 <= len(both.burst) <= 8 for both in first)
    assert [bool(both.follower) for both in first] == [False, False, True] * 2


def test_no_question_comes_again_before_all_have_come() -> None:
    asked = texts(question_rounds(QUESTIONS, 40, 3, 64))
    assert len(asked) > 100
    assert len(set(asked[:100])) == 100


def test_a_question_s_own_limit_prevails() -> None:
    (both,) = question_rounds([question(1, 7)], 1, 0, 64)
    assert {one.sampling.max_tokens for one in both.burst} == {7}
    (both,) = question_rounds([question(1)], 1, 0, 64)
    assert {one.sampling.max_tokens for one in both.burst} == {64}
