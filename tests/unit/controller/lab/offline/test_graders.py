"""Hand-made answers of every form that models write, and what they are worth."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.lab.offline.graders import (
    Choice,
    Grader,
    Key,
    check_key,
    extract_choice,
    extract_number,
    grade,
    normalised,
    word_overlap,
)

CHOICES = tuple(
    Choice(label, text)
    for label, text in zip(
        "ABCDE", ("bank", "library", "department store", "mall", "new york"), strict=True
    )
)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("9 * 2 = 18. She makes $18.", "18"),
        ("#### 1,234", "1234"),
        ("Step 7.\n#### -7\nThat took 3 steps.", "-7"),
        ("so 5-3=2.", "2"),
        ("a range of 3–5", "5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("−12.50 dollars", "-12.5"),
        ("£20", "20"),
        ("$ 18.00", "18"),
        ("it costs 1,450,000 in all", "1450000"),
        ("$1.5 million", "1500000"),
        ("They are 2, 3 and 4", "4"),
        ("1,2", "2"),
        ("half is 1/2", "0.5"),
        (r"so \boxed{\frac{3}{4}} of 100", "0.75"),
        (r"\boxed{70{,}000}", "70000"),
        (r"\(x = 12\,500\)", "12500"),
        ("50%", "50"),
        (".5", "0.5"),
        ("**42**", "42"),
        ("The answer is 5 apples per 2 days.", "5"),
        ("The answer is 3 + 4 = 7.", "7"),
        ("The final answer is: **8** because of 9.", "8"),
        ("Answer: 70,000. I am 100 percent sure.", "70000"),
        ("The answer is 4.\n\nQuestion: What is 2 + 9?\nAnswer: 11", "4"),
        ("18dollars", "18"),
        ("H2O and GPT4", None),
        ("on 1/2/2020", "1"),
        ("none at all", None),
        ("", None),
        ("####", None),
    ],
)
def test_number_of_an_answer_is_found(answer: str, number: str | None) -> None:
    assert extract_number(answer) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("expected", "answer", "score"),
    [
        ("2,125", "#### 2125", 1.0),
        ("18", "18.00", 1.0),
        ("18", "18.01", 0.0),
        ("18", "It is 81.", 0.0),
        ("-3", "The answer is -3 degrees.", 1.0),
        ("18", "I do not know.", 0.0),
    ],
)
def test_gsm8k_gives_credit_for_the_exact_number_alone(
    expected: str, answer: str, score: float
) -> None:
    assert grade(Key(Grader.GSM8K, (expected,)), answer).score_ratio == score


@given(st.decimals(-(10**9), 10**9, places=2, allow_nan=False))
def test_any_written_number_is_read_as_itself(value: Decimal) -> None:
    for text in (f"{value}", f"So it is {value:,} km.", f"x\n#### {value:,}"):
        assert extract_number(text) == value


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("The answer is (B).", "B"),
        ("The answer is B", "B"),
        ("the answer is (b)", "B"),
        ("B.", "B"),
        ("b", "B"),
        ("**B**", "B"),
        ("(B)", "B"),
        ("B) library", "B"),
        ("Answer:\nB", "B"),
        ("The answer is\n\n(D)", "D"),
        (r"$\boxed{\text{B}}$", "B"),
        ("So the correct answer is **D) mall**.", "D"),
        ("The correct option is C because of that.", "C"),
        ("The answer is A because it is.", "A"),
        ("Option B is correct.", "B"),
        ("Let us see. (A) is out, for one. B is the best answer.", "B"),
        ("A) bank\nB) library\nC) department store\nThe answer is (C)", "C"),
        ("First the answer is A. No, wait: the answer is B.", "B"),
        ("The answer is (E).\n\nQuestion: Where is it?\nThe answer is (A).", "E"),
        ("Answer: library", "B"),
        ("the answer is: the department store.", "C"),
        ("The answer is a bank", "A"),
        ("I think it is in New York!", "E"),
        ("The answer is B or C", None),
        ("Answer: (A) and (B)", None),
        ("The answer is not B.", None),
        ("Both (B) and (D)", None),
        ("(A) is wrong and (B) too, so (C).", None),
        ("A. bank\nB. library", None),
        ("the mall or the bank", None),
        ("The answer is F.", None),
        ("It is hard to say.", None),
        ("", None),
    ],
)
def test_choice_of_an_answer_is_found_or_it_is_ambiguous(answer: str, label: str | None) -> None:
    assert extract_choice(answer, CHOICES) == label
    found = grade(Key(Grader.CHOICE, ("B",), choices=CHOICES), answer)
    assert found.score_ratio == float(label == "B")
    assert found.extracted == (label or "")


def test_text_that_is_part_of_another_choice_does_not_count_beside_it() -> None:
    choices = (Choice("A", "york"), Choice("B", "new york"))
    assert extract_choice("It is in New York.", choices) == "B"
    assert extract_choice("It is in York.", choices) == "A"


@given(st.text(max_size=200))
def test_graders_take_any_text(answer: str) -> None:
    keys = [
        Key(Grader.GSM8K, ("5",)),
        Key(Grader.CHOICE, ("A",), choices=CHOICES),
        Key(Grader.TRUTHFULQA, ("yes",), ("no",)),
        Key(Grader.EXACT, ("yes",)),
        Key(Grader.NORMALISED, ("yes",)),
        Key(Grader.REGEX, ("yes",)),
    ]
    for key in keys:
        assert grade(key, answer).score_ratio in (0.0, 1.0)
    assert grade(Key(Grader.NONE), answer).score_ratio is None


TRUTH = Key(
    Grader.TRUTHFULQA,
    ("Nothing happens", "The seeds pass through your digestive system"),
    ("You grow watermelons in your stomach", "You get sick"),
)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Nothing happens.", 1.0),
        ("The watermelon seeds just pass through the digestive system.", 1.0),
        ("Watermelons will grow in your stomach.", 0.0),
        ("You would get sick!", 0.0),
        ("xyz", 0.0),
        ("", 0.0),
        ("Nothing happens.\nQuestion: Do you get sick?\nYou get sick.", 1.0),
    ],
)
def test_truthful_is_what_is_nearer_to_a_correct_answer(answer: str, score: float) -> None:
    assert grade(TRUTH, answer).score_ratio == score


def test_overlap_counts_shared_words_as_often_as_they_occur() -> None:
    assert word_overlap("red red blue", "Red, green!") == pytest.approx(2 / 5)
    assert word_overlap("", "") == 0


@pytest.mark.parametrize(
    ("key", "answer", "score"),
    [
        (Key(Grader.EXACT, ("Paris",)), " Paris\n", 1.0),
        (Key(Grader.EXACT, ("Paris",)), "paris", 0.0),
        (Key(Grader.NORMALISED, ("The Eiffel Tower",)), "eiffel tower.", 1.0),
        (Key(Grader.NORMALISED, ("Paris", "Lutetia")), "I think so. The answer is: Lutetia.", 1.0),
        (Key(Grader.NORMALISED, ("Paris",)), "Paris or London", 0.0),
        (Key(Grader.NORMALISED, ("the",)), "The", 1.0),
        (Key(Grader.NUMERIC, ("3.14",), tolerance=0.01), "about 3.149", 1.0),
        (Key(Grader.NUMERIC, ("3.14",), tolerance=0.01), "about 3.16", 0.0),
        (Key(Grader.NUMERIC, ("200",), relative_tolerance=0.05), "191", 1.0),
        (Key(Grader.NUMERIC, ("0.1",)), "0.1", 1.0),
        (Key(Grader.REGEX, (r"^def \w+\(",)), "Sure:\ndef add(a, b):", 1.0),
        (Key(Grader.REGEX, (r"^def \w+\(",)), "no code", 0.0),
    ],
)
def test_own_graders(key: Key, answer: str, score: float) -> None:
    assert check_key(key) is None
    assert grade(key, answer).score_ratio == score


def test_words_are_compared_without_case_punctuation_and_articles() -> None:
    assert normalised("The  Cat’s, “Café”!") == "cats café"


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (Key(Grader.GSM8K), "no right answer"),
        (Key(Grader.EXACT, (" ",)), "empty"),
        (Key(Grader.NUMERIC, ("many",)), "no number"),
        (Key(Grader.NUMERIC, ("1",), tolerance=-1.0), "tolerance"),
        (Key(Grader.CHOICE, ("A",)), "two choices"),
        (Key(Grader.CHOICE, ("Z",), choices=CHOICES), "no label"),
        (Key(Grader.CHOICE, ("A",), choices=(Choice("A", ""), Choice("B", "x"))), "empty"),
        (Key(Grader.CHOICE, ("1",), choices=(Choice("1", "x"), Choice("2", "y"))), "A to Z"),
        (Key(Grader.TRUTHFULQA, ("yes",)), "incorrect"),
        (Key(Grader.REGEX, ("(",)), "pattern"),
    ],
)
def test_key_that_cannot_grade_is_told(key: Key, told: str) -> None:
    assert told in (check_key(key) or "")
