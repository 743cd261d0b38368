"""Question files as published are read whole, and a bad line is named."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from controller.lab.offline.graders import Grader
from controller.lab.offline.questions import Part, chosen, parted
from controller.lab.offline.workloads import WorkloadError, read_workload
from tests.fakes.published import published

TRUTHFULQA = ["Type", "Category", "Question", "Best Answer", "Correct Answers",
              "Incorrect Answers", "Source"]  # fmt: skip


def lines(*records: dict[str, Any] | str) -> str:
    return "".join(
        (record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records
    )


def table(path: Path, *rows: list[str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def test_gsm8k_is_recognised_and_its_number_is_the_key(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl.gz"
    text = lines(
        {"question": "What is 1,000 + 125?", "answer": "It is <<1000+125=1125>>.\n#### 1,125"},
        {"question": "What is 2 - 5?", "answer": "#### -3"},
    )
    path.write_bytes(gzip.compress(text.encode()))
    first, second = read_workload(path)
    assert (first.workload, first.question_class) == ("gsm8k", "gsm8k")
    assert (first.question_id, second.question_id) == ("test/0", "test/1")
    assert (first.key.grader, first.key.expected) == (Grader.GSM8K, ("1,125",))
    (message,) = first.messages
    assert message.role == "user"
    assert message.content.startswith("What is 1,000 + 125?\n\nLet's think step by step.")


@pytest.mark.parametrize("has_header", [True, False])
def test_mmlu_is_read_in_one_file_or_a_subjects_own(tmp_path: Path, has_header: bool) -> None:
    row = ["Which,\nof these?", "a", "b", "c", "d", "C"]
    if has_header:
        header = ["subject", "index", "question", "A", "B", "C", "D", "answer"]
        path = table(tmp_path / "mmlu.csv", header, ["anatomy", "0", *row])
    else:
        path = table(tmp_path / "anatomy_test.csv", row)
    (question,) = read_workload(path)
    assert (question.workload, question.question_class) == ("mmlu", "anatomy")
    assert question.question_id == "anatomy/0"
    assert question.key.expected == ("C",)
    assert "\nA) a\nB) b\nC) c\nD) d\n" in question.text


def test_mmlu_pro_has_as_many_options_as_it_likes(tmp_path: Path) -> None:
    known = {"question_id": 70, "category": "law", "question": "Which?", "answer": "J"}
    options = [f"option {n}" for n in range(10)]
    path = tmp_path / "test.jsonl"
    path.write_text(lines({**known, "options": options, "answer_index": 9}))
    (question,) = read_workload(path)
    assert (question.workload, question.question_id) == ("mmlu-pro", "70")
    assert (question.question_class, question.key.expected) == ("law", ("J",))
    assert "\nI) option 8\nJ) option 9\n" in question.text
    path.write_text(lines({**known, "options": options[:9]}))
    with pytest.raises(WorkloadError, match="line 1: the right answer J is no label"):
        read_workload(path)


def test_commonsenseqa_keeps_its_labels(tmp_path: Path) -> None:
    choices = [{"label": label, "text": f"place {label}"} for label in "ABCDE"]
    path = tmp_path / "dev.jsonl"
    path.write_text(
        lines({"id": "x1", "answerKey": "E", "question": {"stem": "Where?", "choices": choices}})
    )
    (question,) = read_workload(path)
    assert (question.question_id, question.key.expected) == ("x1", ("E",))
    assert "E) place E" in question.text


def test_truthfulqa_choices_are_shuffled_by_the_seed_and_by_nothing_else(tmp_path: Path) -> None:
    rows = [
        ["Adversarial", "Law", f"Q{n}?", "best", "best; good", "w1; w2; w3;", "src"]
        for n in range(30)
    ]
    path = table(tmp_path / "TruthfulQA.csv", TRUTHFULQA, *rows)
    questions = read_workload(path, seed=1)
    assert questions == read_workload(path, seed=1)
    for question in questions:
        (right,) = question.key.expected
        texts = {choice.label: choice.text for choice in question.key.choices}
        assert texts[right] == "best"
        assert sorted(texts.values()) == ["best", "w1", "w2", "w3"]
    assert {question.key.expected for question in questions} == {("A",), ("B",), ("C",), ("D",)}
    assert [q.key for q in questions] != [q.key for q in read_workload(path, seed=2)]
    # A question has the same order whatever else is in its file.
    alone = table(tmp_path / "one.csv", TRUTHFULQA, rows[7])
    assert read_workload(alone, seed=1) == [questions[7]]


def test_truthfulqa_may_be_answered_freely(tmp_path: Path) -> None:
    row = ["Adversarial", "Law", "Why?", "best", "best; good", "w1; w2", "src"]
    path = table(tmp_path / "TruthfulQA.csv", TRUTHFULQA, row)
    (question,) = read_workload(path, "truthfulqa-generation")
    assert question.key.grader is Grader.TRUTHFULQA
    assert question.key.expected == ("best", "good")
    assert question.key.incorrect == ("w1", "w2")


def test_own_questions_say_what_they_are_graded_by(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path.write_text(
        lines(
            {"prompt": "Capital of France?", "answer": ["Paris", "paris city"]},
            "",
            {"id": 7, "messages": turns, "class": "talk", "max_tokens": 9},
            {"id": "c", "prompt": "Pick", "choices": ["x", "y"], "answer": "B"},
            {"id": "n", "prompt": "Pi?", "answer": 3.14, "grader": "numeric", "tolerance": 0.01},
        )
    )
    first, talk, choice, number = read_workload(path)
    assert (first.workload, first.question_id, first.question_class) == ("mine", "mine/0", "mine")
    assert (first.key.grader, len(first.key.expected)) == (Grader.NORMALISED, 2)
    assert (talk.question_id, talk.question_class, talk.max_tokens) == ("7", "talk", 9)
    assert (talk.key.grader, [m.role for m in talk.messages]) == (Grader.NONE, ["system", "user"])
    assert (choice.key.grader, "B) y" in choice.text) == (Grader.CHOICE, True)
    assert (number.key.expected, number.key.tolerance) == (("3.14",), 0.01)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ('{"prompt": "x"', "not JSON"),
        ("[1]", "not a JSON object"),
        ({"prompt": ""}, "'prompt' must be a text"),
        ({"prompt": "x", "messages": []}, "either 'prompt' or 'messages'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'role'"),
        ({"messages": [{"role": "user", "content": " "}]}, "the question is empty"),
        ({"prompt": "x", "answr": "y"}, "no field answr"),
        ({"prompt": "x", "grader": "guess"}, "no grader 'guess'"),
        ({"prompt": "x", "grader": "exact"}, "no right answer"),
        ({"prompt": "x", "max_tokens": 0}, "'max_tokens'"),
        ({"prompt": "x", "max_tokens": True}, "'max_tokens'"),
        ({"prompt": "x", "answer": {"a": 1}}, "'answer' must be"),
        ({"prompt": "x", "answer": "1", "grader": "numeric", "tolerance": "x"}, "'tolerance'"),
        ({"prompt": "x", "answer": "(", "grader": "regex"}, "pattern"),
        ({"prompt": "x", "choices": ["y"], "answer": "A"}, "two choices"),
        ({"prompt": "x", "choices": "yz", "answer": "A"}, "'choices'"),
        ({"prompt": "x", "id": "same"}, "is that of line 1"),
        ({"prompt": "x", "id": ""}, "'id'"),
        ({"prompt": "x", "class": 3}, "'class'"),
        ('{"prompt": "\\ud800"}', "surrogate"),
    ],
)
def test_bad_line_refuses_the_file_and_is_named(
    tmp_path: Path, record: dict[str, Any] | str, told: str
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(lines({"prompt": "good", "id": "same"}, record, {"prompt": "good", "id": 3}))
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert told in str(caught.value)


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(lines(*[{"prompt": ""}] * 25))
    with pytest.raises(WorkloadError, match="and 15 more"):
        read_workload(path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", b'{"text": "x"}\n', "no format that is known"),
        ("a.csv", b"one,two\n1,2\n", "no format that is known"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "not UTF-8"),
        ("a.jsonl.gz", b"no gzip", "damaged"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n' * 99, mtime=0)[:-12], "damaged"),
        ("TruthfulQA.csv", ",".join(TRUTHFULQA).encode() + b"\na,b\n", "line 2: fewer columns"),
        ("TruthfulQA.csv", ",".join(TRUTHFULQA).encode() + b"\n", "no questions"),
        ("a_test.csv", b"q,a,b,c,d,A\nq,a,b,c,d\n", "line 2: 5 columns instead of 6"),
        ("a_test.csv", b"q,a,b,c,d,A\nq,a,b,c,d,X\n", "line 2: the right answer X"),
    ],
)
def test_bad_file_is_told(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WorkloadError, match=name) as caught:
        read_workload(tmp_path / name)
    assert told in str(caught.value)


def test_missing_file_and_unknown_format_are_told(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such file"):
        read_workload(tmp_path / "nothing.jsonl")
    with pytest.raises(WorkloadError, match="no format 'xml'"):
        read_workload(tmp_path / "nothing.jsonl", "xml")


def test_sample_is_drawn_by_the_seed_and_keeps_the_order(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(lines(*({"id": n, "prompt": "x", "class": "ab"[n % 2]} for n in range(40))))
    questions = read_workload(path)
    some = chosen(questions, classes=["a"], sample=5, seed=3)
    assert some == chosen(questions, classes=["a"], sample=5, seed=3)
    assert some != chosen(questions, classes=["a"], sample=5, seed=4)
    assert len(some) == 5
    assert all(question.question_class == "a" for question in some)
    numbers = [int(question.question_id) for question in some]
    assert numbers == sorted(numbers)
    assert chosen(questions, sample=100) == questions


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "count", "classes"),
    [
        ("gsm8k/test.jsonl", 1319, 1),
        ("gsm8k/train.jsonl.gz", 7473, 1),
        ("mmlu/mmlu_test.csv.gz", 14042, 57),
        ("truthfulqa/TruthfulQA.csv", 817, 38),
        ("commonsenseqa/dev_rand_split.jsonl", 1221, 1),
        ("mmlu-pro-outcomes/mmlu_pro_questions.jsonl.gz", 12_032, 14),
    ],
)
def test_published_files_are_read_to_the_last_question(file: str, count: int, classes: int) -> None:
    questions = read_workload(published(file))
    assert len(questions) == count
    assert len({question.question_class for question in questions}) == classes


@pytest.mark.data
def test_table_of_outcomes_is_sent_to_where_it_is_taken_in() -> None:
    table = published("routerbench-subset/routerbench_arc_mbpp_winogrande.csv.gz")
    with pytest.raises(WorkloadError, match="`edge-controller lab profile import`"):
        read_workload(table)


@pytest.mark.data
def test_gsm8k_grader_agrees_with_the_published_judgements() -> None:
    from controller.lab.offline.graders import Key, grade

    path = published("gsm8k/example_model_solutions.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for record in map(json.loads, file):
            key = Key(Grader.GSM8K, (record["ground_truth"].rsplit("A:", 1)[1].strip(),))
            for run in ("6b_finetuning", "175b_verification"):
                judged = record[run]
                assert grade(key, judged["solution"]).score_ratio == judged["is_correct"]


def test_parts_share_the_questions_out_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(lines(*({"id": n, "prompt": "x"} for n in range(10))))
    questions = read_workload(path)
    parts = [parted(questions, [Part(index, 4)]) for index in range(4)]
    assert [len(part) for part in parts] == [3, 3, 2, 2]
    numbers = sorted(int(q.question_id) for part in parts for q in part)
    assert numbers == list(range(10))
    assert parted(questions, [Part(1, 4), Part(3, 4)]) == sorted(
        parts[1] + parts[3], key=lambda q: int(q.question_id)
    )
    assert parted(questions, []) == questions


@pytest.mark.parametrize(("index", "of"), [(-1, 4), (4, 4), (0, 0)])
def test_a_part_that_does_not_exist_is_refused(index: int, of: int) -> None:
    with pytest.raises(ValueError, match="part"):
        Part(index, of)
