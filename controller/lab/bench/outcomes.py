"""Published tables of which model answered which prompt, for judging quality estimates."""

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_CHARACTERS_PER_TOKEN: Final = 4.0
"""English text; the tables give lengths in characters."""


class DataMissingError(Exception):
    """The table is not there or not as its README describes it; the text says what was wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class MadeOutcomes:
    """P prompts and M models.

    Attributes:
        name: of the data set.
        prompts: their texts, as a client would send them.
        models: names.
        scores: float32[P, M], 0 to 1, NaN where not run.
        output_tokens: float32[P, M], estimated from characters, NaN where not run.
        profiled: int64; rows that the store may know.
        held_out: int64; rows that are judged.
    """

    name: str
    prompts: tuple[str, ...]
    models: tuple[str, ...]
    scores: NDArray[np.float32]
    output_tokens: NDArray[np.float32]
    profiled: NDArray[np.int64]
    held_out: NDArray[np.int64]


def load_mmlu_pro(folder: Path, profiled: int = 9_000, seed: int = 0) -> MadeOutcomes:
    """MMLU-Pro: the models that ran on all prompts; question and options are the prompt.

    Args:
        folder: has mmlu_pro_questions.jsonl.gz, mmlu_pro_correct.csv.gz and
            mmlu_pro_output_chars.csv.gz.
        profiled: prompts the store may know; the rest is held out.
        seed: of the split.

    Raises:
        DataMissingError: a file is absent or of another form.
    """
    try:
        with gzip.open(folder / "mmlu_pro_questions.jsonl.gz", "rt", encoding="utf-8") as file:
            questions = [json.loads(line) for line in file]
        prompts = {
            str(q["question_id"]): "\n".join([q["question"], *q["options"]]) for q in questions
        }
        correct = list(_rows(folder / "mmlu_pro_correct.csv.gz"))
        characters = list(_rows(folder / "mmlu_pro_output_chars.csv.gz"))
        models = [name for name in correct[0] if name not in ("question_id", "category")]
        scores = np.array([[_number(row[m]) for m in models] for row in correct])
        lengths = np.array([[_number(row[m]) for m in models] for row in characters])
        if [row["question_id"] for row in correct] != [row["question_id"] for row in characters]:
            raise DataMissingError(f"the tables in {folder} have different rows")
        texts = tuple(prompts[row["question_id"]] for row in correct)
    except (OSError, EOFError, KeyError, ValueError, IndexError) as error:
        raise DataMissingError(f"no MMLU-Pro outcomes in {folder}: {error!r}") from error
    complete = ~np.isnan(scores).any(axis=0)
    if not 0 < profiled < len(texts):
        raise DataMissingError(f"{folder} has {len(texts)} prompts; {profiled} cannot be profiled")
    order = np.random.default_rng(seed).permutation(len(texts))
    return MadeOutcomes(
        name="mmlu-pro",
        prompts=texts,
        models=tuple(m for m, kept in zip(models, complete, strict=True) if kept),
        scores=scores[:, complete].astype(np.float32),
        output_tokens=(lengths[:, complete] / _CHARACTERS_PER_TOKEN).astype(np.float32),
        profiled=order[:profiled],
        held_out=order[profiled:],
    )


def load_routerbench(folder: Path) -> MadeOutcomes:
    """The RouterBench subset: 11 models, profiled on its train split and judged on its test split.

    Args:
        folder: has routerbench_arc_mbpp_winogrande.csv.gz.

    Raises:
        DataMissingError: the file is absent or of another form.
    """
    try:
        rows = list(_rows(folder / "routerbench_arc_mbpp_winogrande.csv.gz"))
        models = [n.removesuffix("|score") for n in rows[0] if n.endswith("|score")]
        scores = np.array([[_number(row[f"{m}|score"]) for m in models] for row in rows])
        lengths = np.array([[_number(row[f"{m}|response_chars"]) for m in models] for row in rows])
        is_train = np.array([row["split"] == "train" for row in rows])
        texts = tuple(row["prompt"] for row in rows)
    except (OSError, EOFError, KeyError, ValueError, IndexError) as error:
        raise DataMissingError(f"no RouterBench outcomes in {folder}: {error!r}") from error
    complete = ~np.isnan(scores).any(axis=1)
    return MadeOutcomes(
        name="routerbench",
        prompts=texts,
        models=tuple(models),
        scores=scores.astype(np.float32),
        output_tokens=(np.maximum(lengths, 1.0) / _CHARACTERS_PER_TOKEN).astype(np.float32),
        profiled=np.flatnonzero(complete & is_train),
        held_out=np.flatnonzero(complete & ~is_train),
    )


def load_outcomes(folder: Path) -> MadeOutcomes:
    """The table in a folder, told by its files.

    Raises:
        DataMissingError: the folder holds no table that is known.
    """
    if (folder / "mmlu_pro_correct.csv.gz").exists():
        return load_mmlu_pro(folder)
    if (folder / "routerbench_arc_mbpp_winogrande.csv.gz").exists():
        return load_routerbench(folder)
    raise DataMissingError(
        f"{folder} holds neither mmlu_pro_correct.csv.gz nor "
        "routerbench_arc_mbpp_winogrande.csv.gz; name the folder of an outcome table"
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _number(text: str) -> float:
    return float(text) if text else float("nan")
