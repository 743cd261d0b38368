"""Published tables of which model answered which prompt, taken into a quality store unrun.

Three forms are read: RouterBench's own wide table, the tables `question x model` whose texts are in
a question file beside them, and a long table of prompt, model and score.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controller.lab.offline.questions import Question
from controller.lab.offline.workloads import text_lines

_KEYS: Final = ("index", "subject", "question_id", "category", "row")
_CHARACTERS_PER_TOKEN: Final = 4.0
"""English text; tables give lengths in characters."""


class OutcomeTableError(Exception):
    """A table cannot be used; the text names the file and line, and says what is wrong."""


@dataclass(frozen=True, slots=True)
class TableOutcome:
    """What one model made of one prompt.

    Attributes:
        score_ratio: 0 to 1.
        output_tokens: of its answer; None when the table does not tell.
    """

    prompt: str
    model: str
    score_ratio: float
    output_tokens: int | None


def read_outcomes(path: Path, questions: Sequence[Question] = ()) -> tuple[list[TableOutcome], int]:
    """All outcomes in a table, and how many of its cells are blank, which means not run.

    Args:
        path: .csv or .csv.gz.
        questions: of the table's rows, when it has no prompts itself; told apart by `index` (row
            of the file) or `question_id` and, where there is one, `subject`.

    Raises:
        OutcomeTableError: it is missing, damaged, of another form, or a cell is no score.
    """
    before = csv.field_size_limit(2**31 - 1)
    try:
        return _read(path, questions)
    except FileNotFoundError as error:
        raise OutcomeTableError(f"{path}: there is no such file") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise OutcomeTableError(f"{path}: damaged or no CSV table ({error})") from error
    except OSError as error:
        raise OutcomeTableError(f"{path}: {error.strerror or error}") from error
    finally:
        csv.field_size_limit(before)


def _read(path: Path, questions: Sequence[Question]) -> tuple[list[TableOutcome], int]:
    reader = csv.DictReader(text_lines(path), strict=True)
    columns = list(reader.fieldnames or ())
    if {"prompt", "model", "score"} <= set(columns):
        scores = {"": "score"}
    elif any(name.endswith("|score") for name in columns):
        scores = {n.removesuffix("|score"): n for n in columns if n.endswith("|score")}
    elif any(name.endswith("|total_cost") for name in columns):
        models = [n.removesuffix("|total_cost") for n in columns if n.endswith("|total_cost")]
        scores = {name: name for name in models if name in columns}
    elif questions:
        scores = {name: name for name in columns if name not in _KEYS}
    else:
        scores = {}
    if not scores:
        raise OutcomeTableError(
            f"{path}: no table that is known: it needs the columns prompt, model and score; or "
            "prompt and MODEL|score of each model; or index or question_id and a column of each "
            "model, with --questions naming the file of the questions"
        )
    has_prompts = "prompt" in columns
    texts = {} if has_prompts else _texts(questions)
    found: list[TableOutcome] = []
    blank = 0
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        if None in row or None in row.values():
            raise OutcomeTableError(f"{where}: more or fewer columns than the first line has")
        prompt = row["prompt"] if has_prompts else _text_of(row, texts, where)
        if not prompt.strip():
            raise OutcomeTableError(f"{where}: the prompt is empty")
        for model, column in scores.items():
            if row[column].strip() == "":
                blank += 1
                continue
            score = _score(row[column], f"{where}, column {column}")
            name = model or row["model"]
            found.append(TableOutcome(prompt, name, score, _tokens(row, model)))
    if not found:
        raise OutcomeTableError(f"{path}: no outcomes in it")
    return found, blank


def _texts(questions: Sequence[Question]) -> dict[tuple[str, str], str]:
    """(subject, index) -> what is sent for that question; subject is empty outside MMLU."""
    found = {}
    for question in questions:
        subject, _, index = question.question_id.rpartition("/")
        if question.workload != "mmlu":
            subject = ""
        found[subject, index] = question.text
    return found


def _text_of(row: Mapping[str, str], texts: Mapping[tuple[str, str], str], where: str) -> str:
    number = "index" if "index" in row else "question_id"
    key = (row.get("subject", ""), row.get(number, ""))
    if key not in texts:
        raise OutcomeTableError(
            f"{where}: no question has {number} {key[1]!r}"
            + (f" of subject {key[0]!r}" if key[0] else "")
            + "; do the table and --questions belong together?"
        )
    return texts[key]


def _score(text: str, where: str) -> float:
    known = {"true": 1.0, "false": 0.0}
    try:
        score = known.get(text.strip().lower())
        score = float(text) if score is None else score
    except ValueError as error:
        raise OutcomeTableError(f"{where}: {text!r} is no score") from error
    if not math.isfinite(score) or not 0 <= score <= 1:
        raise OutcomeTableError(f"{where}: {text!r} is not between 0 and 1")
    return score


def _tokens(row: Mapping[str, str], model: str) -> int | None:
    text = row.get(f"{model}|response_chars") or ""
    try:
        return max(1, round(float(text) / _CHARACTERS_PER_TOKEN)) if text else None
    except ValueError:
        return None
