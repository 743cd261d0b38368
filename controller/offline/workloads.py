"""Question sets as files: the standard ones as published, and a JSONL of one's own.

A file is read whole or refused: a bad line is an error that names it, since a question that is
left out in silence would bias every figure.
"""

import csv
import gzip
import json
import random
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from controller.domain.request import ChatMessage
from controller.offline.graders import Choice, Grader, Key, check_key
from controller.offline.prompts import asked_for_choice, asked_for_number, asked_for_sentence
from controller.offline.questions import Question

_LABELS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MAX_ERRORS: Final = 10
_MAX_TOKENS: Final = 1_000_000


class WorkloadError(Exception):
    """A question set cannot be used; the text names file and lines, and says what is wrong."""


class _BadLine(ValueError):
    """One line is wrong; the text says how."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One record of a file: its line number, and its fields."""

    number: int
    fields: Mapping[str, Any]


def read_workload(path: Path, format: str = "auto", seed: int = 0) -> list[Question]:
    """The questions of a file, in its order.

    Args:
        path: .jsonl or .csv, also compressed (.gz).
        format: one of `FORMATS`, or "auto" to tell it by the content.
        seed: of the order of choices that are made here (TruthfulQA).

    Raises:
        WorkloadError: the file is missing, damaged, of no known format, or has a bad line.
    """
    if format != "auto" and format not in _READERS:
        raise WorkloadError(f"no format {format!r}; there are: auto, {', '.join(FORMATS)}")
    found = _detect(path) if format == "auto" else format
    lines_of, read_line = _READERS[found]
    questions: list[Question] = []
    errors: list[str] = []
    numbers: dict[str, int] = {}
    for line in _reading(path, lines_of(path)):
        try:
            question = _checked(read_line(line, path, seed), numbers)
        except _BadLine as error:
            errors.append(f"{path}, line {line.number}: {error}")
            continue
        numbers[question.question_id] = line.number
        questions.append(question)
    if errors:
        more = [f"and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
        raise WorkloadError("\n".join([*errors[:_MAX_ERRORS], *more]))
    if not questions:
        raise WorkloadError(f"{path}: no questions in it")
    return questions


def named_workload(name: str, format: str = "auto") -> tuple[Path, str]:
    """File and format of "[FORMAT=]FILE"; `format` where it names none."""
    before, is_named, after = name.partition("=")
    return (Path(after), before) if is_named and before in FORMATS else (Path(name), format)


def _checked(question: Question, numbers: Mapping[str, int]) -> Question:
    wrong = check_key(question.key)
    if wrong is not None:
        raise _BadLine(wrong)
    if question.question_id in numbers:
        raise _BadLine(
            f"its id {question.question_id!r} is that of line {numbers[question.question_id]}"
        )
    if not question.text.strip():
        raise _BadLine("the question is empty")
    try:
        for text in (question.question_id, question.question_class, question.text):
            text.encode()
    except UnicodeEncodeError as error:
        raise _BadLine("half of a surrogate pair in its text") from error
    return question


def _reading(path: Path, lines: Iterator[_Line]) -> Generator[_Line, None, None]:
    """The lines; what is wrong with the file as a whole becomes a `WorkloadError`."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield from lines
    except FileNotFoundError as error:
        raise WorkloadError(f"{path}: there is no such file") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise WorkloadError(f"{path}: damaged or cut off ({error})") from error
    except csv.Error as error:
        raise WorkloadError(f"{path}: not a CSV table ({error})") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error
    finally:
        csv.field_size_limit(before)


def text_lines(path: Path) -> Iterator[str]:
    """Lines with their ends; a byte order mark is dropped."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield from file
    else:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file


def _stem(path: Path) -> str:
    """A file's name without .gz and its kind."""
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


# -- records --------------------------------------------------------------------------------------


def _json_lines(path: Path) -> Iterator[_Line]:
    for number, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        try:
            found = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            yield _Line(number, {_BROKEN: f"not JSON ({error}); is the file cut off?"})
            continue
        if isinstance(found, dict):
            yield _Line(number, found)
        else:
            yield _Line(number, {_BROKEN: "not a JSON object"})


_BROKEN: Final = "\0broken"
"""Stands for the fields of a line that has none that can be read."""


def _csv_lines(path: Path) -> Iterator[_Line]:
    reader = csv.DictReader(text_lines(path), restkey=_EXTRA, restval=None, strict=True)
    for row in reader:
        yield _Line(reader.line_num, _whole(row))


_EXTRA: Final = "\0extra"


def _whole(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if _EXTRA in row:
        return {_BROKEN: "more columns than the first line names"}
    if None in row.values():
        return {_BROKEN: "fewer columns than the first line names"}
    return row


def _mmlu_lines(path: Path) -> Iterator[_Line]:
    """Rows of one file with a header, or of a subject's own file without one."""
    reader = csv.reader(text_lines(path), strict=True)
    subject = _stem(path)
    for ending in ("_test", "_dev", "_val"):
        subject = subject.removesuffix(ending)
    header = ["question", "A", "B", "C", "D", "answer"]
    index = 0
    for row in reader:
        if not row:
            continue
        if {"subject", "question", "answer"} <= set(row) and index == 0:
            header = row
            continue
        if len(row) != len(header):
            wrong = f"{len(row)} columns instead of {len(header)}"
            yield _Line(reader.line_num, {_BROKEN: wrong})
        else:
            own = {"subject": subject, "index": str(index)}
            yield _Line(reader.line_num, {**own, **dict(zip(header, row, strict=True))})
        index += 1


def _field(line: _Line, name: str) -> Any:
    if _BROKEN in line.fields:
        raise _BadLine(str(line.fields[_BROKEN]))
    if name not in line.fields:
        raise _BadLine(f"{name!r} is missing")
    return line.fields[name]


def _text(line: _Line, name: str) -> str:
    found = _field(line, name)
    if not isinstance(found, str) or not found.strip():
        raise _BadLine(f"{name!r} must be a text that is not empty")
    return found


# -- one question of each format ------------------------------------------------------------------


def _gsm8k(line: _Line, path: Path, seed: int) -> Question:
    answer = _text(line, "answer")
    if "####" not in answer:
        raise _BadLine("'answer' has no #### before its number")
    return Question(
        workload="gsm8k",
        question_id=f"{_stem(path)}/{line.number - 1}",
        question_class="gsm8k",
        messages=asked_for_number(_text(line, "question")),
        key=Key(Grader.GSM8K, (answer.rsplit("####", 1)[1].strip(),)),
    )


def _mmlu(line: _Line, path: Path, seed: int) -> Question:
    choices = tuple(Choice(label, str(_field(line, label))) for label in "ABCD")
    subject = _text(line, "subject")
    return Question(
        workload="mmlu",
        question_id=f"{subject}/{_text(line, 'index')}",
        question_class=subject,
        messages=asked_for_choice(_text(line, "question"), choices),
        key=Key(Grader.CHOICE, (_text(line, "answer").strip(),), choices=choices),
    )


def _mmlu_pro(line: _Line, path: Path, seed: int) -> Question:
    options = _field(line, "options")
    if not isinstance(options, list) or not all(isinstance(text, str) for text in options):
        raise _BadLine("'options' must be a list of texts")
    if len(options) > len(_LABELS):
        raise _BadLine(f"'options' must be at most {len(_LABELS)}")
    choices = tuple(Choice(label, text) for label, text in zip(_LABELS, options, strict=False))
    return Question(
        workload="mmlu-pro",
        question_id=str(_field(line, "question_id")),
        question_class=_text(line, "category"),
        messages=asked_for_choice(_text(line, "question"), choices),
        key=Key(Grader.CHOICE, (_text(line, "answer").strip(),), choices=choices),
    )


def _commonsenseqa(line: _Line, path: Path, seed: int) -> Question:
    asked = _field(line, "question")
    try:
        stem = asked["stem"]
        choices = tuple(Choice(found["label"], found["text"]) for found in asked["choices"])
    except (KeyError, TypeError) as error:
        raise _BadLine("'question' must have 'stem' and 'choices' of label and text") from error
    if not all(isinstance(t, str) for c in choices for t in (stem, c.label, c.text)):
        raise _BadLine("'stem', labels and choices must be texts")
    return Question(
        workload="commonsenseqa",
        question_id=_text(line, "id"),
        question_class="commonsenseqa",
        messages=asked_for_choice(stem, choices),
        key=Key(Grader.CHOICE, (_text(line, "answerKey"),), choices=choices),
    )


def _truthfulqa_choices(line: _Line, path: Path, seed: int) -> Question:
    """The best answer among the incorrect ones, in an order that the seed decides (MC1)."""
    question = _text(line, "Question").strip()
    best = _text(line, "Best Answer").strip()
    texts = [best, *(text for text in _answers(line, "Incorrect Answers") if text != best)]
    # The question is part of the seed, so that a sample has the order that the whole has.
    random.Random(f"{seed}:{question}").shuffle(texts)
    choices = tuple(Choice(label, text) for label, text in zip(_LABELS, texts, strict=False))
    right = next((c.label for c in choices if c.text == best), "")
    return Question(
        workload="truthfulqa",
        question_id=question,
        question_class=_text(line, "Category"),
        messages=asked_for_choice(question, choices),
        key=Key(Grader.CHOICE, (right,), choices=choices),
    )


def _truthfulqa_generation(line: _Line, path: Path, seed: int) -> Question:
    question = _text(line, "Question").strip()
    return Question(
        workload="truthfulqa",
        question_id=question,
        question_class=_text(line, "Category"),
        messages=asked_for_sentence(question),
        key=Key(
            Grader.TRUTHFULQA,
            tuple(dict.fromkeys([_text(line, "Best Answer"), *_answers(line, "Correct Answers")])),
            _answers(line, "Incorrect Answers"),
        ),
    )


def _answers(line: _Line, name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in _text(line, name).split(";") if part.strip())


_OWN_FIELDS: Final = {
    "id", "prompt", "messages", "answer", "grader", "class", "max_tokens", "choices", "incorrect",
    "tolerance", "relative_tolerance",
}  # fmt: skip


def _own(line: _Line, path: Path, seed: int) -> Question:
    """docs/profiling-data.md describes the fields."""
    if _BROKEN in line.fields:
        raise _BadLine(str(line.fields[_BROKEN]))
    unknown = sorted(set(line.fields) - _OWN_FIELDS)
    if unknown:
        raise _BadLine(
            f"no field {', '.join(unknown)}; there are: {', '.join(sorted(_OWN_FIELDS))}"
        )
    name = _stem(path)
    choices = _own_choices(line)
    expected = _own_texts(line, "answer")
    grader = _own_grader(line, choices, expected)
    max_tokens = line.fields.get("max_tokens")
    if max_tokens is not None and (
        not isinstance(max_tokens, int)
        or isinstance(max_tokens, bool)
        or not 1 <= max_tokens <= _MAX_TOKENS
    ):
        raise _BadLine(f"'max_tokens' must be a whole number from 1 to {_MAX_TOKENS}")
    key = Key(
        grader,
        () if grader is Grader.NONE else expected,
        _own_texts(line, "incorrect"),
        choices,
        _own_number(line, "tolerance"),
        _own_number(line, "relative_tolerance"),
    )
    own_id = line.fields.get("id", f"{name}/{line.number - 1}")
    if not isinstance(own_id, str | int) or isinstance(own_id, bool) or own_id == "":
        raise _BadLine("'id' must be a text or a whole number")
    own_class = line.fields.get("class", name)
    if not isinstance(own_class, str) or not own_class:
        raise _BadLine("'class' must be a text that is not empty")
    return Question(name, str(own_id), own_class, _own_messages(line, choices), key, max_tokens)


def _own_grader(line: _Line, choices: tuple[Choice, ...], expected: tuple[str, ...]) -> Grader:
    told = line.fields.get("grader")
    if told is None:
        if choices:
            return Grader.CHOICE
        return Grader.NORMALISED if expected else Grader.NONE
    try:
        return Grader(told)
    except ValueError as error:
        names = ", ".join(grader.value for grader in Grader)
        raise _BadLine(f"no grader {told!r}; there are: {names}") from error


def _own_messages(line: _Line, choices: tuple[Choice, ...]) -> tuple[ChatMessage, ...]:
    if ("prompt" in line.fields) == ("messages" in line.fields):
        raise _BadLine("give either 'prompt' or 'messages'")
    if "prompt" in line.fields:
        prompt = _text(line, "prompt")
        return asked_for_choice(prompt, choices) if choices else (ChatMessage("user", prompt),)
    turns = line.fields["messages"]
    if not isinstance(turns, list) or not turns:
        raise _BadLine("'messages' must be a list of turns")
    found = []
    for turn in turns:
        if (
            not isinstance(turn, dict)
            or set(turn) != {"role", "content"}
            or turn["role"] not in ("system", "user", "assistant")
            or not isinstance(turn["content"], str)
        ):
            raise _BadLine(
                "each of 'messages' must have a 'role' (system, user or assistant) and a 'content'"
            )
        found.append(ChatMessage(turn["role"], turn["content"]))
    return tuple(found)


def _own_choices(line: _Line) -> tuple[Choice, ...]:
    given = line.fields.get("choices", [])
    if not isinstance(given, list) or len(given) > len(_LABELS):
        raise _BadLine(f"'choices' must be a list of at most {len(_LABELS)} texts")
    if not all(isinstance(text, str) for text in given):
        raise _BadLine("'choices' must be texts")
    return tuple(Choice(label, text) for label, text in zip(_LABELS, given, strict=False))


def _own_texts(line: _Line, name: str) -> tuple[str, ...]:
    given = line.fields.get(name, [])
    several = given if isinstance(given, list) else [given]
    if not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in several):
        raise _BadLine(f"{name!r} must be a text or a number, or a list of them")
    return tuple(str(value) for value in several)


def _own_number(line: _Line, name: str) -> float:
    found = line.fields.get(name, 0)
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise _BadLine(f"{name!r} must be a number")
    return float(found)


_READERS: Final[
    Mapping[str, tuple[Callable[[Path], Iterator[_Line]], Callable[[_Line, Path, int], Question]]]
] = {
    "gsm8k": (_json_lines, _gsm8k),
    "mmlu": (_mmlu_lines, _mmlu),
    "truthfulqa": (_csv_lines, _truthfulqa_choices),
    "truthfulqa-generation": (_csv_lines, _truthfulqa_generation),
    "mmlu-pro": (_json_lines, _mmlu_pro),
    "commonsenseqa": (_json_lines, _commonsenseqa),
    "jsonl": (_json_lines, _own),
}
FORMATS: Final = tuple(_READERS)
"""Names of the formats that files may have."""


# -- which format ---------------------------------------------------------------------------------


def _detect(path: Path) -> str:
    """The format that the first record shows.

    Raises:
        WorkloadError: none is recognised.
    """
    lines = _reading(path, (_Line(0, {"text": text}) for text in text_lines(path)))
    first = next((line.fields["text"] for line in lines if line.fields["text"].strip()), None)
    lines.close()
    if first is None:
        raise WorkloadError(f"{path}: empty")
    if first.lstrip().startswith("{"):
        found = _detect_json(first)
    else:
        # A record may go on over several lines.
        rows = _reading(path, (_Line(0, {"row": row}) for row in csv.reader(text_lines(path))))
        found = _detect_table(next((line.fields["row"] for line in rows if line.fields["row"]), []))
        rows.close()
    if found is None:
        raise WorkloadError(
            f"{path}: no format that is known by its first line; name one with --format: "
            f"{', '.join(FORMATS)}. A table of outcomes is not asked but taken in, by "
            "`edge-controller profile import`."
        )
    return found


def _detect_json(first: str) -> str | None:
    try:
        fields = json.loads(first)
    except (json.JSONDecodeError, RecursionError):
        return "jsonl"  # its reader says what is wrong with the line
    keys = set(fields)
    if {"answerKey", "question"} <= keys:
        return "commonsenseqa"
    if {"prompt", "messages"} & keys:
        return "jsonl"
    if {"question_id", "question", "options", "answer"} <= keys:
        return "mmlu-pro"
    return "gsm8k" if "question" in keys and "####" in str(fields.get("answer")) else None


def _detect_table(columns: list[str]) -> str | None:
    if {"Question", "Best Answer", "Incorrect Answers"} <= set(columns):
        return "truthfulqa"
    if {"subject", "question", "A", "B", "C", "D", "answer"} <= set(columns):
        return "mmlu"
    return "mmlu" if len(columns) == 6 and columns[5].strip() in tuple("ABCD") else None
