"""Outcome tables of the published forms, and what is wrong with others."""

import gzip
from pathlib import Path

import pytest

from controller.lab.offline.outcome_tables import OutcomeTableError, TableOutcome, read_outcomes
from controller.lab.offline.workloads import read_workload
from tests.fakes.published import published


def test_wide_table_with_prompts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    text = "row,a|score,b|score,a|response_chars,prompt\n0,1.0,,40,Hi\n1,0.5,0,,Ho\n"
    path.write_bytes(gzip.compress(text.encode()))
    assert read_outcomes(path) == (
        [
            TableOutcome("Hi", "a", 1.0, 10),
            TableOutcome("Ho", "a", 0.5, None),
            TableOutcome("Ho", "b", 0.0, None),
        ],
        1,
    )


def test_routerbench_as_published_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("sample_id,prompt,a,a|model_response,a|total_cost\nx,Hi,True,yes,0.1\n")
    assert read_outcomes(path) == ([TableOutcome("Hi", "a", 1.0, None)], 0)


def test_long_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,model,score\nHi,a,1\nHi,b,0\n")
    outcomes, _ = read_outcomes(path)
    assert [(outcome.model, outcome.score_ratio) for outcome in outcomes] == [("a", 1), ("b", 0)]


def test_numbered_table_takes_its_texts_from_the_questions(tmp_path: Path) -> None:
    questions = tmp_path / "anatomy_test.csv"
    questions.write_text("Which?,a,b,c,d,A\nWho?,a,b,c,d,B\n")
    known = read_workload(questions)
    path = tmp_path / "a.csv"
    path.write_text("subject,index,m\nanatomy,1,1\n")
    (outcome,), _ = read_outcomes(path, known)
    assert outcome.prompt == known[1].text
    path.write_text("subject,index,m\nanatomy,2,1\n")
    with pytest.raises(OutcomeTableError, match="line 2: no question has index '2'"):
        read_outcomes(path, known)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("index,a\n0,1\n", "--questions"),
        ("prompt,model,score\nHi,a,yes\n", "line 2, column score: 'yes' is no score"),
        ("prompt,model,score\nHi,a,1.5\n", "not between 0 and 1"),
        ("prompt,model,score\nHi,a,nan\n", "not between 0 and 1"),
        ("prompt,model,score\nHi,a\n", "line 2: more or fewer columns"),
        ("prompt,model,score\n ,a,1\n", "the prompt is empty"),
        ("prompt,model,score\n", "no outcomes"),
        ("", "no table that is known"),
    ],
)
def test_bad_table_is_told(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(OutcomeTableError) as caught:
        read_outcomes(path)
    assert told in str(caught.value)


@pytest.mark.data
def test_published_tables_are_read_to_the_last_cell() -> None:
    router = published("routerbench-subset/routerbench_arc_mbpp_winogrande.csv.gz")
    joined = published("joined-outcomes/gsm8k_test_outcomes.csv.gz")
    outcomes, blank = read_outcomes(router)
    assert (len(outcomes), blank) == (3178 * 11 - 154, 154)
    questions = read_workload(published("gsm8k/test.jsonl"))
    outcomes, blank = read_outcomes(joined, questions)
    assert (len(outcomes), blank) == (1319 * 69 - 638, 638)
    questions = read_workload(published("mmlu-pro-outcomes/mmlu_pro_questions.jsonl.gz"))
    outcomes, blank = read_outcomes(
        published("mmlu-pro-outcomes/mmlu_pro_correct.csv.gz"), questions
    )
    assert len({outcome.prompt for outcome in outcomes}) <= len(questions) == 12_032
    assert len(outcomes) + blank == 12_032 * len({outcome.model for outcome in outcomes})
