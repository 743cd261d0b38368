import csv
import gzip
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from controller.lab.bench.outcomes import (
    DataMissingError,
    MadeOutcomes,
    load_mmlu_pro,
    load_outcomes,
    load_routerbench,
)
from controller.lab.bench.quality import (
    brier_score,
    calibration_error,
    calibration_of,
    evaluate,
    evaluate_table,
    evaluation_as_json,
    log_loss,
)

MODELS = ("strong", "weak", "specialist")


def table_of_topics(
    prompts: int = 600, topics: int = 6
) -> tuple[MadeOutcomes, NDArray[np.float32]]:
    """Prompts around topics; each topic has its own difficulty, and one suits the specialist."""
    rng = np.random.default_rng(5)
    topic = rng.integers(topics, size=prompts)
    centres = rng.standard_normal((topics, 24))
    vectors = centres[topic] + 0.3 * rng.standard_normal((prompts, 24))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ease = np.linspace(-0.3, 0.3, topics)[topic]
    chance = np.stack([0.65 + ease, 0.45 + ease, np.where(topic == 0, 0.95, 0.3)], axis=1)
    scores = (rng.random(chance.shape) < np.clip(chance, 0.02, 0.98)).astype(np.float32)
    return (
        MadeOutcomes(
            name="topics",
            prompts=tuple(f"prompt {row}" for row in range(prompts)),
            models=MODELS,
            scores=scores,
            output_tokens=(100.0 * (1 + topic)[:, None] * np.ones(3)).astype(np.float32),
            profiled=np.arange(0, prompts, 2),
            held_out=np.arange(1, prompts, 2),
        ),
        vectors.astype(np.float32),
    )


def test_neighbours_tell_more_than_the_mean_where_topics_differ() -> None:
    table, vectors = table_of_topics()
    rows = {row.form: row for row in evaluate_table(table, vectors, "made up").rows}
    assert rows["ours"].brier < rows["paper"].brier < rows["destination-mean"].brier
    assert rows["ours"].log_loss < rows["destination-mean"].log_loss
    assert rows["ours"].argmax_accuracy > rows["ours"].best_single_accuracy
    ours, mean = (rows[form].length_error_ratio for form in ("ours", "destination-mean"))
    assert ours is not None
    assert mean is not None
    assert ours < mean / 2
    assert rows["paper"].length_error_ratio is None


def test_held_out_outcomes_do_not_reach_the_estimates() -> None:
    table, vectors = table_of_topics()
    flipped = table.scores.copy()
    flipped[table.held_out] = 1.0 - flipped[table.held_out]
    changed = MadeOutcomes(
        table.name,
        table.prompts,
        table.models,
        flipped,
        table.output_tokens,
        table.profiled,
        table.held_out,
    )
    before, after = (evaluate_table(t, vectors, "made up") for t in (table, changed))
    for row, other in zip(before.rows, after.rows, strict=True):
        estimates = [(found.estimates, found.mean_estimate) for found in row.calibration]
        assert estimates == [(found.estimates, found.mean_estimate) for found in other.calibration]
        assert row.brier < other.brier


def test_scores_by_hand() -> None:
    estimates, outcomes = np.array([[0.8, 0.0]]), np.array([[1.0, 1.0]])
    assert brier_score(estimates, outcomes) == pytest.approx((0.04 + 1.0) / 2)
    assert log_loss(estimates, outcomes) == pytest.approx(-(math.log(0.8) + math.log(0.01)) / 2)


def test_calibration_compares_estimates_with_what_came() -> None:
    estimates = np.array([0.05, 0.05, 0.95, 1.0])
    bins = calibration_of(estimates, np.array([0.0, 1.0, 1.0, 1.0]))
    assert [found.estimates for found in bins] == [2, 2]
    assert bins[0].observed_ratio == 0.5
    assert calibration_error(bins) == pytest.approx((2 * 0.45 + 2 * 0.025) / 4)


def test_the_result_is_plain_json() -> None:
    table, vectors = table_of_topics(prompts=60)
    plain = json.loads(json.dumps(evaluation_as_json(evaluate_table(table, vectors, "made up"))))
    assert set(plain["rows"]) == {"destination-mean", "paper", "ours"}
    assert {
        "brier",
        "log_loss",
        "argmax_accuracy",
        "best_single_accuracy",
        "calibration",
    } <= plain["rows"]["ours"].keys()


def write_gz(path: Path, text: str) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(text)


def as_csv(rows: list[list[object]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def write_mmlu_pro(folder: Path, prompts: int = 8) -> None:
    questions = [
        {"question_id": n, "question": f"Question {n}?", "options": ["yes", "no"]}
        for n in range(prompts)
    ]
    write_gz(
        folder / "mmlu_pro_questions.jsonl.gz", "".join(json.dumps(q) + "\n" for q in questions)
    )
    head: list[object] = ["question_id", "category", "whole", "partial"]
    correct: list[list[object]] = [
        [n, "maths", n % 2, "" if n == 3 else 1] for n in reversed(range(prompts))
    ]
    characters: list[list[object]] = [[n, "maths", 40, 80] for n in reversed(range(prompts))]
    write_gz(folder / "mmlu_pro_correct.csv.gz", as_csv([head, *correct]))
    write_gz(folder / "mmlu_pro_output_chars.csv.gz", as_csv([head, *characters]))


def test_mmlu_pro_is_read_with_the_models_that_ran_on_everything(tmp_path: Path) -> None:
    write_mmlu_pro(tmp_path)
    table = load_mmlu_pro(tmp_path, profiled=5)
    assert table.models == ("whole",)
    assert table.prompts[0] == "Question 7?\nyes\nno"
    assert table.scores[:, 0].tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert table.output_tokens[0, 0] == 10.0
    assert sorted([*table.profiled, *table.held_out]) == list(range(8))
    assert len(table.profiled) == 5
    with pytest.raises(DataMissingError, match="cannot be profiled"):
        load_mmlu_pro(tmp_path, profiled=8)


def test_routerbench_is_split_as_published_without_incomplete_rows(tmp_path: Path) -> None:
    rows: list[list[object]] = [
        ["split", "a|score", "b|score", "a|response_chars", "b|response_chars", "prompt"],
        ["train", 1.0, 0.0, 4, 8, "one"],
        ["test", 0.5, 1.0, 4, 8, "two"],
        ["train", "", 1.0, 4, 8, "three"],
    ]
    write_gz(tmp_path / "routerbench_arc_mbpp_winogrande.csv.gz", as_csv(rows))
    table = load_outcomes(tmp_path)
    assert table.models == ("a", "b")
    assert (table.profiled.tolist(), table.held_out.tolist()) == ([0], [1])
    assert table.scores[1].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("load", [load_mmlu_pro, load_routerbench, load_outcomes])
def test_a_folder_without_a_table_is_a_clear_error(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataMissingError):
        load(tmp_path)


class CountingBackend:
    """Turns a text into a direction and counts the texts."""

    model = "counting"
    dimension = 4

    def __init__(self, name: str = "counting/float") -> None:
        self.name = name
        self.texts = 0

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts += len(texts)
        angles = [float(len(text)) for text in texts]
        return np.array([[math.cos(a), math.sin(a), 0.0, 0.0] for a in angles], dtype=np.float32)


def test_embeddings_are_kept_for_the_same_prompts_and_backend_only(tmp_path: Path) -> None:
    rows: list[list[object]] = [["split", "a|score", "a|response_chars", "prompt"]]
    rows += [[("train", "test")[n % 2], n % 3 / 2, 9, f"prompt {'x' * n}"] for n in range(12)]
    write_gz(tmp_path / "routerbench_arc_mbpp_winogrande.csv.gz", as_csv(rows))
    kept = tmp_path / "kept" / "embeddings.npz"
    backend = CountingBackend()
    first = evaluate(tmp_path, backend, embeddings_file=kept)
    assert evaluate(tmp_path, backend, embeddings_file=kept) == first
    assert backend.texts == 12
    other = CountingBackend("other/float")
    evaluate(tmp_path, other, embeddings_file=kept)
    assert other.texts == 12
    kept.write_bytes(b"damaged")
    evaluate(tmp_path, other, embeddings_file=kept)
    assert other.texts == 24


def test_damaged_tables_are_a_clear_error(tmp_path: Path) -> None:
    write_mmlu_pro(tmp_path)
    (tmp_path / "mmlu_pro_correct.csv.gz").write_bytes(b"not gzip")
    with pytest.raises(DataMissingError, match="no MMLU-Pro outcomes"):
        load_mmlu_pro(tmp_path)
