"""Scores of answers against known right ones; plain functions of texts.

docs/profiling-data.md has the rules in words. In doubt an answer gets no credit: a grader that
guesses what was meant makes every model look alike.
"""

import enum
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final


class Grader(enum.Enum):
    """How an answer is compared with the right one; the value is the name that files use."""

    GSM8K = "gsm8k"
    CHOICE = "choice"
    TRUTHFULQA = "truthfulqa"
    EXACT = "exact"
    NORMALISED = "normalised"
    NUMERIC = "numeric"
    REGEX = "regex"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Choice:
    """One option of a multiple-choice question; `label` is a capital letter."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Key:
    """What an answer is graded by.

    Attributes:
        expected: right answers, at least one unless the grader is NONE: a number (GSM8K, NUMERIC),
            a label (CHOICE), texts (TRUTHFULQA, EXACT, NORMALISED), a pattern (REGEX).
        incorrect: known wrong answers, for TRUTHFULQA.
        choices: all options, for CHOICE.
        tolerance: how far a NUMERIC answer may be off.
        relative_tolerance: the same, as a share of the right number.
    """

    grader: Grader
    expected: tuple[str, ...] = ()
    incorrect: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    tolerance: float = 0.0
    relative_tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader made of an answer.

    Attributes:
        score_ratio: 0 wrong to 1 right; None when there is nothing to grade by.
        extracted: what was read out of the answer. Empty: nothing that could be credited.
    """

    score_ratio: float | None
    extracted: str


def grade(key: Key, answer: str) -> Grade:
    """The score of an answer.

    Args:
        key: whose `check_key` found nothing wrong.
        answer: the whole text that the model wrote.
    """
    match key.grader:
        case Grader.NONE:
            return Grade(None, "")
        case Grader.GSM8K:
            return _grade_number(key, answer)
        case Grader.NUMERIC:
            return _grade_number(key, answer)
        case Grader.CHOICE:
            label = extract_choice(answer, key.choices)
            return Grade(float(label in key.expected), label or "")
        case Grader.TRUTHFULQA:
            return _grade_truthfulness(key, answer)
        case Grader.EXACT:
            stripped = answer.strip()
            return Grade(float(stripped in {e.strip() for e in key.expected}), stripped)
        case Grader.NORMALISED:
            return _grade_normalised(key, answer)
        case Grader.REGEX:
            return _grade_pattern(key, answer)


def check_key(key: Key) -> str | None:
    """What is wrong with a key, in words; None if nothing is."""
    if key.grader is Grader.NONE:
        return None
    if not key.expected:
        return "there is no right answer"
    if key.grader is not Grader.REGEX and not all(text.strip() for text in key.expected):
        return "a right answer is empty"
    if key.grader in (Grader.GSM8K, Grader.NUMERIC):
        for text in key.expected:
            if extract_number(text) is None:
                return f"the right answer {text!r} has no number in it"
        if not (0 <= key.tolerance < float("inf") and 0 <= key.relative_tolerance < float("inf")):
            return "the tolerance must be 0 or more"
    if key.grader is Grader.CHOICE:
        labels = [choice.label for choice in key.choices]
        if len(labels) < 2 or len(set(labels)) != len(labels):
            return "there must be at least two choices, with different labels"
        if not all(re.fullmatch("[A-Z]", label) for label in labels):
            return "labels of choices are the letters A to Z"
        if not all(choice.text.strip() for choice in key.choices):
            return "the text of a choice is empty"
        if not set(key.expected) <= set(labels):
            return f"the right answer {', '.join(key.expected)} is no label of a choice"
    if key.grader is Grader.TRUTHFULQA and not key.incorrect:
        return "there are no incorrect answers to compare with"
    if key.grader is Grader.REGEX:
        for pattern in key.expected:
            try:
                re.compile(pattern)
            except re.error as error:
                return f"the pattern {pattern!r} is wrong: {error}"
    return None


# -- what part of a text is the answer ------------------------------------------------------------

_NEXT_QUESTION: Final = re.compile(r"\n\s*(?:Question|Q|Problem)\s*\d*\s*[:.]\s", re.IGNORECASE)
_ANNOUNCED: Final = re.compile(
    r"\banswers?\s*(?:\([^)\n]{0,20}\)\s*)?(?:\*\*|__)?\s*(?:is|are|=|:|was|would\s+be|must\s+be|should\s+be)"
    r"(?:\s*(?:\*\*|__))?(?:\s*:)?",
    re.IGNORECASE,
)
_SENTENCE_END: Final = re.compile(r"\n|[.!?](?=\s|$)")
_BOXED: Final = re.compile(r"\\boxed\s*\{")


def _first_turn(answer: str) -> str:
    """The answer without the next question that a base model makes up and answers, too."""
    found = _NEXT_QUESTION.search(answer, pos=min(1, len(answer)))
    return answer[: found.start()] if found else answer


def _announced(answer: str) -> list[str]:
    """What follows each "the answer is", up to the end of its line, the last one first."""
    found = [answer[m.end() :].lstrip().split("\n", 1)[0] for m in _ANNOUNCED.finditer(answer)]
    return [text for text in reversed(found) if text.strip()]


def _boxed(answer: str) -> str | None:
    r"""The content of the last \boxed{...}; None when there is none, or it is not closed."""
    starts = [match.end() for match in _BOXED.finditer(answer)]
    if not starts:
        return None
    depth, start = 1, starts[-1]
    for position in range(start, len(answer)):
        depth += {"{": 1, "}": -1}.get(answer[position], 0)
        if depth == 0:
            return answer[start:position]
    return None


# -- numbers --------------------------------------------------------------------------------------

_NUMBER: Final = re.compile(
    r"""
    (?<![\w./])                                  # not inside a word, another number or a date
    (?P<sign>(?<![\w)\]%°])[-−–+])?              # "5-3" has no negative number in it
    \s?(?:[$€£¥₹]\s?)?
    (?P<sign_after>(?<=[$€£¥₹])[-−])?
    (?P<whole>\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d+)?
    (?P<fraction>\.\d+)?
    (?:/(?P<under>\d+(?:\.\d+)?)(?![\d/]))?      # 3/4
    (?:[eE](?P<exponent>[+-]?\d{1,2})(?!\w))?
    (?:\s?(?P<scale>thousand|million|billion)\b)?
    """,
    re.VERBOSE,
)
_SCALES: Final = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_FRACTION_COMMAND: Final = re.compile(r"\\[dt]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")


def extract_number(answer: str) -> Decimal | None:
    r"""The number that an answer ends up with; None if it has none.

    In this order: what follows the last "####", the content of the last \boxed{}, what follows the
    last "the answer is", the last number of all.
    """
    text = _plain_mathematics(_first_turn(answer))
    for part in (text.rsplit("####", 1)[1:], [_boxed(text) or ""], _announced(text)[:1]):
        if part and (found := _stated_number(part[0])) is not None:
            return found
    return _last_number(text)


def _plain_mathematics(text: str) -> str:
    """LaTeX and typography that would split or hide a number, taken away."""
    text = unicodedata.normalize("NFKC", text.replace("½", ".5")).replace("⁄", "/")
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")
    text = text.replace("\\%", "%").replace("**", "").replace("__", "")
    return _FRACTION_COMMAND.sub(r" \1/\2 ", text)


def _stated_number(text: str) -> Decimal | None:
    """The number of a statement: the first one, or of an equation what it comes to."""
    sentence = _SENTENCE_END.split(text.strip(), maxsplit=1)[0]
    if "=" in sentence:
        after = _numbers(sentence.rsplit("=", 1)[1])
        if after:
            return after[0]
    found = _numbers(sentence)
    return found[0] if found else None


def _last_number(text: str) -> Decimal | None:
    found = _numbers(text)
    return found[-1] if found else None


def _numbers(text: str) -> list[Decimal]:
    found = []
    for match in _NUMBER.finditer(text):
        whole, fraction = match["whole"], match["fraction"]
        if whole is None and fraction is None:
            continue
        try:
            value = Decimal((whole or "0").replace(",", "") + (fraction or ""))
            if match["exponent"]:
                value = value.scaleb(int(match["exponent"]))
            if match["under"] and Decimal(match["under"]) != 0:
                value /= Decimal(match["under"])
        except (InvalidOperation, ValueError):
            continue
        if match["scale"]:
            value *= _SCALES[match["scale"]]
        is_negative = (match["sign"] or "") in ("-", "−", "–") and match["sign"]
        found.append(-value if is_negative or match["sign_after"] else value)
    return found


def _grade_number(key: Key, answer: str) -> Grade:
    found = extract_number(answer)
    if found is None:
        return Grade(0.0, "")
    is_right = False
    for text in key.expected:
        right = extract_number(text)
        if right is not None:
            allowed = max(
                Decimal(repr(key.tolerance)), Decimal(repr(key.relative_tolerance)) * abs(right)
            )
            is_right = is_right or abs(found - right) <= allowed
    return Grade(float(is_right), _number_text(found))


def _number_text(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# -- choices --------------------------------------------------------------------------------------

_CHOICE_ANNOUNCED: Final = re.compile(
    r"""
    \b(?:answer|option|choice|response)s?\b
    \s*(?:\([^)\n]{0,20}\)\s*)?
    \s*(?:is|are|=|:|would\s+be|must\s+be|should\s+be)
    \s*:?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LEADING_LABEL: Final = re.compile(
    r"""
    ^\s*(?:the\s+)?(?:(?:option|choice|letter|answer)\s+)?
    (?P<open>[(\["'`]?)\s*(?P<label>[A-Za-z])(?P<close>(?:\s*[)\]"'`.:,;])*)(?P<rest>.*)$
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_WRAPPED_LABEL: Final = re.compile(
    r"[(\[]\s*([A-Z])\s*[)\]]|(?:\*\*|__)\s*([A-Z])[.):]?\s*(?:\*\*|__)"
)
_LINE_LABEL: Final = re.compile(r"^\s*[(\[]?([A-Z])(?:[)\].:]|\s-)(?=\s|$)")
_CALLED_RIGHT: Final = re.compile(
    r"(?<![\w'’])[(\[]?([A-Z])[)\]]?\s+(?:is|would\s+be|must\s+be)\s+(?:the\s+)?"
    r"(?:(?:most|only|best)\s+)?(?:correct|right|best|true|accurate|appropriate|answer)\b"
)
_FURTHER_LABEL: Final = re.compile(
    r"^\s*(?:,|;|/|\bor\b|\band\b|&)\s*(?:option\s+)?[(\[]?([A-Z])\b"
)
_AFTER_ARTICLE: Final = re.compile(
    r"^\s+(?!(?:because|since|as|for|which|with|due|given|that|based|here)\b)[a-z]"
)


def extract_choice(answer: str, choices: Sequence[Choice]) -> str | None:
    r"""The label that an answer settles on; None if that is none, or more than one.

    In this order: the content of the last \boxed{}; what is said by the last "the answer is" (a
    label, or the text of a choice); a label that is all of the last or the first line; the only
    label that is called right; the only label in brackets, in bold or at the start of a line; the
    only choice whose text is in the last sentence, or anywhere.
    """
    labels = {choice.label for choice in choices}
    text = _first_turn(answer)
    boxed = _boxed(text)
    if boxed is not None:
        content = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*", "", boxed).strip("{} ")
        return _stated_choice(content, choices, labels)
    plain = text.replace("**", "").replace("__", "")
    statements = [
        plain[match.end() :].lstrip().split("\n", 1)[0]
        for match in _CHOICE_ANNOUNCED.finditer(plain)
    ]
    for statement in reversed([s for s in statements if s.strip()]):
        found = _stated_choice(statement, choices, labels)
        if found is not None or _is_several(statement, labels):
            return found
    lines = [line for line in plain.splitlines() if line.strip()]
    if not lines:
        return None
    alone = _lone_label(lines[-1], labels) or _lone_label(lines[0], labels)
    if alone is not None:
        return alone
    called = {match[1] for match in _CALLED_RIGHT.finditer(plain)} & labels
    wrapped = {match[1] or match[2] for match in _WRAPPED_LABEL.finditer(text)} & labels
    begun = {m[1] for line in lines if (m := _LINE_LABEL.match(line))} & labels
    for found_labels in (called, wrapped | begun):
        if len(found_labels) == 1:
            return found_labels.pop()
    last = _last_sentence(lines[-1])
    if begun and _LINE_LABEL.match(lines[-1]):
        return None  # it lists the options again
    return _only_named(last, choices) or _only_named(plain, choices)


def _lone_label(line: str, labels: set[str]) -> str | None:
    """The label that is all there is on a line."""
    alone = line.strip().strip("()[].:*_`\"' ").upper()
    return alone if alone in labels else None


def _stated_choice(statement: str, choices: Sequence[Choice], labels: set[str]) -> str | None:
    """What a statement such as "(B) library." says."""
    match = _LEADING_LABEL.match(statement)
    if match is not None:
        label, rest = match["label"], match["rest"]
        is_apart = bool(match["close"]) or not rest or not rest[0].isalnum()
        is_marked = bool(match["open"]) or ")" in match["close"] or not rest.strip()
        is_label = label.upper() in labels and is_apart and (label.isupper() or is_marked)
        if is_label and not is_marked and not match["close"] and label in ("A", "I"):
            is_label = _AFTER_ARTICLE.match(rest) is None
        if is_label:
            further = _FURTHER_LABEL.match(
                rest if not match["close"].endswith((",", ";")) else "," + rest
            )
            is_several = further is not None and further[1] in labels - {label.upper()}
            return None if is_several else label.upper()
    return _named_choice(statement, choices)


def _is_several(statement: str, labels: set[str]) -> bool:
    """Whether a statement names more than one label, so that it settles on none."""
    match = _LEADING_LABEL.match(statement)
    if match is None or match["label"] not in labels:
        return False
    rest = match["rest"] if not match["close"].endswith((",", ";")) else "," + match["rest"]
    further = _FURTHER_LABEL.match(rest)
    return further is not None and further[1] in labels - {match["label"]}


def _named_choice(statement: str, choices: Sequence[Choice]) -> str | None:
    """The choice whose text the statement is, or the only one it has in its first sentence."""
    said = normalised(statement)
    equal = [choice.label for choice in choices if normalised(choice.text) == said]
    if len(equal) == 1:
        return equal[0]
    return _only_named(_SENTENCE_END.split(statement, maxsplit=1)[0], choices)


def _last_sentence(line: str) -> str:
    parts = [part for part in _SENTENCE_END.split(line) if part.strip()]
    return parts[-1] if parts else ""


def _only_named(text: str, choices: Sequence[Choice]) -> str | None:
    """The only choice whose text is in a text; one that is part of another named one is not."""
    said = f" {normalised(text)} "
    named = {
        choice.label: words
        for choice in choices
        if (words := normalised(choice.text)) and f" {words} " in said
    }
    whole = [
        label
        for label, words in named.items()
        if not any(words != other and f" {words} " in f" {other} " for other in named.values())
    ]
    return whole[0] if len(whole) == 1 else None


# -- texts ----------------------------------------------------------------------------------------

_ARTICLES: Final = frozenset({"a", "an", "the"})


def normalised(text: str) -> str:
    """Words without case, accents of typography, punctuation and articles, one space apart."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(
        " " if unicodedata.category(c)[0] in "PZC" and c not in "'’" else c for c in folded
    )
    words = kept.replace("'", "").replace("’", "").split()
    return " ".join(word for word in words if word not in _ARTICLES) or " ".join(words)


def _grade_normalised(key: Key, answer: str) -> Grade:
    """Right when the whole answer, or what follows its last "the answer is", is a right one."""
    expected = {normalised(text) for text in key.expected}
    text = _first_turn(answer).strip()
    candidates = [text, *_announced(text)[:1], *(s for s in [_boxed(text)] if s)]
    for candidate in candidates:
        if normalised(candidate) in expected:
            return Grade(1.0, candidate)
    return Grade(0.0, candidates[1] if len(candidates) > 1 else text)


def _grade_pattern(key: Key, answer: str) -> Grade:
    for pattern in key.expected:
        found = re.search(pattern, answer, re.MULTILINE)
        if found is not None:
            return Grade(1.0, found[0])
    return Grade(0.0, "")


def _grade_truthfulness(key: Key, answer: str) -> Grade:
    """Right when the answer is nearer to a correct one than to every incorrect one."""
    text = _first_turn(answer).strip()
    announced = _announced(text)
    said = announced[0] if announced else text
    right = _nearness(said, key.expected)
    wrong = _nearness(said, key.incorrect)
    return Grade(float(right > wrong), said if max(right, wrong) > 0 else "")


def _nearness(text: str, references: Iterable[str]) -> float:
    """The best F1 of shared words with any reference, 0 to 1."""
    return max((word_overlap(text, reference) for reference in references), default=0.0)


def word_overlap(text: str, reference: str) -> float:
    """F1 of the words that two texts share, each counted as often as it occurs (ROUGE-1)."""
    first, second = normalised(text).split(), normalised(reference).split()
    remaining = list(second)
    shared = 0
    for word in first:
        if word in remaining:
            remaining.remove(word)
            shared += 1
    return 2 * shared / (len(first) + len(second)) if shared else 0.0
