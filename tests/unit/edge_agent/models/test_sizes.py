"""Sizes of files that another process moves and removes meanwhile."""

from pathlib import Path

import pytest

from edge_agent.models.sizes import file_sizes, size_of
from tests.fakes.vanishing import leave_name_of_nothing, remove_when_listed


def test_sizes_of_all_files_below_a_folder(tmp_path: Path) -> None:
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "inner" / "deep" / "three").write_bytes(b"123")
    assert sorted(file_sizes(tmp_path)) == [1, 3]


def test_a_folder_that_goes_away_while_it_is_walked_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "going" / "deep").mkdir(parents=True)
    (tmp_path / "going" / "deep" / "two").write_bytes(b"12")
    (tmp_path / "staying").write_bytes(b"123")
    remove_when_listed(monkeypatch, tmp_path / "going")
    assert list(file_sizes(tmp_path)) == [3]


def test_a_file_that_went_after_it_was_listed_has_no_size(tmp_path: Path) -> None:
    leave_name_of_nothing(tmp_path / "gone")
    (tmp_path / "staying").write_bytes(b"123")
    assert list(file_sizes(tmp_path)) == [3]
    assert size_of(tmp_path / "gone") == 0


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert list(file_sizes(tmp_path / "never")) == []
