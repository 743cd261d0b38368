"""What a journal keeps through crashes, and which runs it goes on with."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from controller.lab.offline.journal import (
    Failure,
    Journal,
    JournalError,
    Plan,
    read_journal,
    read_plan,
)
from controller.lab.offline.summary import summarised
from tests.unit.controller.lab.offline.rows import measurement

PLAN = Plan("run-1", ("test.jsonl gsm8k abc",), "digest", 256, 0)
ROW = measurement(answer="line\nend “quoted”", score_ratio=None)
FAILURE = Failure("profiled", "gsm8k", "test/0", "pi", "small", 3, "UNAVAILABLE: gone", 1.5)


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    with Journal(tmp_path / "run", PLAN, resume=False) as journal:
        journal.append(ROW)
        journal.append(FAILURE)
    assert list(read_journal(tmp_path / "run")) == [ROW, FAILURE]
    assert read_plan(tmp_path / "run") == PLAN


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_line_that_was_cut_off_anywhere_is_taken_away(tmp_path: Path, kept: int) -> None:
    with Journal(tmp_path, PLAN, resume=False) as journal:
        journal.append(ROW)
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    assert list(read_journal(tmp_path)) == [ROW]
    with Journal(tmp_path, PLAN, resume=True) as journal:
        assert journal.repaired_bytes == kept
        journal.append(FAILURE)
    assert list(read_journal(tmp_path)) == [ROW, FAILURE]


def test_run_goes_on_under_its_first_id_and_only_with_an_equal_plan(tmp_path: Path) -> None:
    with Journal(tmp_path, PLAN, resume=False):
        pass
    with pytest.raises(JournalError, match="--resume"):
        Journal(tmp_path, PLAN, resume=False)
    with Journal(tmp_path, replace(PLAN, run_id="run-2"), resume=True) as journal:
        assert journal.plan == PLAN
    for changed in (
        replace(PLAN, questions="others"),
        replace(PLAN, seed=1),
        replace(PLAN, max_tokens=10),
        replace(PLAN, workloads=()),
    ):
        with pytest.raises(JournalError, match="other"):
            Journal(tmp_path, changed, resume=True)


def test_first_run_may_say_resume(tmp_path: Path) -> None:
    with Journal(tmp_path / "new", PLAN, resume=True) as journal:
        assert journal.plan == PLAN


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    first = Journal(tmp_path, PLAN, resume=False)
    with pytest.raises(JournalError, match="another profiling run"):
        Journal(tmp_path, PLAN, resume=True)
    first.close()
    Journal(tmp_path, PLAN, resume=True).close()


def test_damaged_line_in_the_midst_is_an_error_that_names_it(tmp_path: Path) -> None:
    with Journal(tmp_path, PLAN, resume=False) as journal:
        journal.append(FAILURE)
        journal.append(FAILURE)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"attempts": 3', b'"attempts" 3', 1))
    with pytest.raises(JournalError, match="line 1: damaged"):
        list(read_journal(tmp_path))


def test_missing_parts_are_told(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no profiling run"):
        list(read_journal(tmp_path))
    with pytest.raises(JournalError, match="no profiling run"):
        read_plan(tmp_path)
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(JournalError, match=r"run\.json is missing"):
        Journal(tmp_path, PLAN, resume=True)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(JournalError, match="damaged"):
        Journal(tmp_path, PLAN, resume=True)


def test_full_disk_is_told_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path, PLAN, resume=False) as journal:
        journal.append(FAILURE)

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(JournalError, match="No space left on device"):
            journal.append(ROW)
        with pytest.raises(JournalError, match="closed"):
            journal.append(ROW)
    monkeypatch.undo()
    assert list(read_journal(tmp_path)) == [FAILURE]


def test_failure_that_was_mended_later_does_not_count() -> None:
    mended = replace(
        ROW, workload="gsm8k", question_id="test/0", node_id="pi", model="small", score_ratio=1.0
    )
    other = replace(FAILURE, question_id="test/1")
    (row,) = summarised([FAILURE, mended, other])
    assert (row.answered, row.failed, row.graded, row.mean_score_ratio) == (1, 1, 1, 1.0)
    (row,) = summarised([mended, FAILURE])
    assert (row.answered, row.failed) == (1, 0)
