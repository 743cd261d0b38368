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
from pathlib import Path
from typing import Any, Final

from controller.lab.offline.graders import Choice, Grader, Key, check_key
from controller.lab.offline.own_questions import own_question
from controller.lab.offline.prompts import asked_for_choice, asked_for_number, asked_for_sentence
from controller.lab.offline.question_lines import (
    BROKEN,
    LABELS,
    BadLine,
    Line,
    field_of,
    stem_of,
    text_of,
)
from controller.lab.offline.questions import Question

_MAX_ERRORS: Final = 10


class WorkloadError(Exception):
    """A question set cannot be used; the text names file and lines, and says what is wrong."""


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
        except BadLine as error:
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
        raise BadLine(wrong)
    if question.question_id in numbers:
        raise BadLine(
            f"its id {question.question_id!r} is that of line {numbers[question.question_id]}"
        )
    if not question.text.strip():
        raise BadLine("the question is empty")
    try:
        for text in (question.question_id, question.question_class, question.text):
            text.encode()
    except UnicodeEncodeError as error:
        raise BadLine("half of a surrogate pair in its text") from error
    return question


def _reading(path: Path, lines: Iterator[Line]) -> Generator[Line, None, None]:
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


# -- records --------------------------------------------------------------------------------------


def _json_lines(path: Path) -> Iterator[Line]:
    for number, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        try:
            found = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            yield Line(number, {BROKEN: f"not JSON ({error}); is the file cut off?"})
            continue
        if isinstance(found, dict):
            yield Line(number, found)
        else:
            yield Line(number, {BROKEN: "not a JSON object"})


def _csv_lines(path: Path) -> Iterator[Line]:
    reader = csv.DictReader(text_lines(path), restkey=_EXTRA, restval=None, strict=True)
    for row in reader:
        yield Line(reader.line_num, _whole(row))


_EXTRA: Final = "\0extra"


def _whole(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if _EXTRA in row:
        return {BROKEN: "more columns than the first line names"}
    if None in row.values():
        return {BROKEN: "fewer columns than the first line names"}
    return row


def _mmlu_lines(path: Path) -> Iterator[Line]:
    """Rows of one file with a header, or of a subject's own file without one."""
    reader = csv.reader(text_lines(path), strict=True)
    subject = stem_of(path)
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
            yield Line(reader.line_num, {BROKEN: wrong})
        else:
            own = {"subject": subject, "index": str(index)}
            yield Line(reader.line_num, {**own, **dict(zip(header, row, strict=True))})
        index += 1


# -- one question of each format ------------------------------------------------------------------


def _gsm8k(line: Line, path: Path, seed: int) -> Question:
    answer = text_of(line, "answer")
    if "####" not in answer:
        raise BadLine("'answer' has no #### before its number")
    return Question(
        workload="gsm8k",
        question_id=f"{stem_of(path)}/{line.number - 1}",
        question_class="gsm8k",
        messages=asked_for_number(text_of(line, "question")),
        key=Key(Grader.GSM8K, (answer.rsplit("####", 1)[1].strip(),)),
    )


def _mmlu(line: Line, path: Path, seed: int) -> Question:
    choices = tuple(Choice(label, str(field_of(line, label))) for label in "ABCD")
    subject = text_of(line, "subject")
    return Question(
        workload="mmlu",
        question_id=f"{subject}/{text_of(line, 'index')}",
        question_class=subject,
        messages=asked_for_choice(text_of(line, "question"), choices),
        key=Key(Grader.CHOICE, (text_of(line, "answer").strip(),), choices=choices),
    )


def _mmlu_pro(line: Line, path: Path, seed: int) -> Question:
    options = field_of(line, "options")
    if not isinstance(options, list) or not all(isinstance(text, str) for text in options):
        raise BadLine("'options' must be a list of texts")
    if len(options) > len(LABELS):
        raise BadLine(f"'options' must be at most {len(LABELS)}")
    choices = tuple(Choice(label, text) for label, text in zip(LABELS, options, strict=False))
    return Question(
        workload="mmlu-pro",
        question_id=str(field_of(line, "question_id")),
        question_class=text_of(line, "category"),
        messages=asked_for_choice(text_of(line, "question"), choices),
        key=Key(Grader.CHOICE, (text_of(line, "answer").strip(),), choices=choices),
    )


def _commonsenseqa(line: Line, path: Path, seed: int) -> Question:
    asked = field_of(line, "question")
    try:
        stem = asked["stem"]
        choices = tuple(Choice(found["label"], found["text"]) for found in asked["choices"])
    except (KeyError, TypeError) as error:
        raise BadLine("'question' must have 'stem' and 'choices' of label and text") from error
    if not all(isinstance(t, str) for c in choices for t in (stem, c.label, c.text)):
        raise BadLine("'stem', labels and choices must be texts")
    return Question(
        workload="commonsenseqa",
        question_id=text_of(line, "id"),
        question_class="commonsenseqa",
        messages=asked_for_choice(stem, choices),
        key=Key(Grader.CHOICE, (text_of(line, "answerKey"),), choices=choices),
    )


def _truthfulqa_choices(line: Line, path: Path, seed: int) -> Question:
    """The best answer among the incorrect ones, in an order that the seed decides."""
    question = text_of(line, "Question").strip()
    best = text_of(line, "Best Answer").strip()
    texts = [best, *(text for text in _answers(line, "Incorrect Answers") if text != best)]
    # The question is part of the seed, so that a sample has the order that the whole has.
    random.Random(f"{seed}:{question}").shuffle(texts)
    choices = tuple(Choice(label, text) for label, text in zip(LABELS, texts, strict=False))
    right = next((c.label for c in choices if c.text == best), "")
    return Question(
        workload="truthfulqa",
        question_id=question,
        question_class=text_of(line, "Category"),
        messages=asked_for_choice(question, choices),
        key=Key(Grader.CHOICE, (right,), choices=choices),
    )


def _truthfulqa_generation(line: Line, path: Path, seed: int) -> Question:
    question = text_of(line, "Question").strip()
    return Question(
        workload="truthfulqa",
        question_id=question,
        question_class=text_of(line, "Category"),
        messages=asked_for_sentence(question),
        key=Key(
            Grader.TRUTHFULQA,
            tuple(
                dict.fromkeys([text_of(line, "Best Answer"), *_answers(line, "Correct Answers")])
            ),
            _answers(line, "Incorrect Answers"),
        ),
    )


def _answers(line: Line, name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text_of(line, name).split(";") if part.strip())


_READERS: Final[
    Mapping[str, tuple[Callable[[Path], Iterator[Line]], Callable[[Line, Path, int], Question]]]
] = {
    "gsm8k": (_json_lines, _gsm8k),
    "mmlu": (_mmlu_lines, _mmlu),
    "truthfulqa": (_csv_lines, _truthfulqa_choices),
    "truthfulqa-generation": (_csv_lines, _truthfulqa_generation),
    "mmlu-pro": (_json_lines, _mmlu_pro),
    "commonsenseqa": (_json_lines, _commonsenseqa),
    "jsonl": (_json_lines, own_question),
}
FORMATS: Final = tuple(_READERS)
"""Names of the formats that files may have."""


# -- which format ---------------------------------------------------------------------------------


def _detect(path: Path) -> str:
    """The format that the first record shows.

    Raises:
        WorkloadError: none is recognised.
    """
    lines = _reading(path, (Line(0, {"text": text}) for text in text_lines(path)))
    first = next((line.fields["text"] for line in lines if line.fields["text"].strip()), None)
    lines.close()
    if first is None:
        raise WorkloadError(f"{path}: empty")
    if first.lstrip().startswith("{"):
        found = _detect_json(first)
    else:
        # A record may go on over several lines.
        rows = _reading(path, (Line(0, {"row": row}) for row in csv.reader(text_lines(path))))
        found = _detect_table(next((line.fields["row"] for line in rows if line.fields["row"]), []))
        rows.close()
    if found is None:
        raise WorkloadError(
            f"{path}: no format that is known by its first line; name one with --format: "
            f"{', '.join(FORMATS)}. A table of outcomes is not asked but taken in, by "
            "`edge-controller lab profile import`."
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
