import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from controller.routing import compiled
from controller.routing.compiled import STALE_AFTER_DAYS, stable_order
from tests.fakes.vanishing import remove_when_listed

LONG_AGO = time.time() - (STALE_AFTER_DAYS + 1) * 86_400


@compiled.compiled
def order_of(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return stable_order(values)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, -3.0, np.inf]), max_size=40))
def test_order_is_that_of_a_stable_sort(values: list[float]) -> None:
    array = np.array(values, dtype=np.float64)
    assert order_of(array).tolist() == np.argsort(array, kind="stable").tolist()


def cache_in(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(base))
    folder = compiled._cache_folder()
    assert folder is not None
    return folder


def aged(folder: Path) -> Path:
    (folder / "routing").mkdir(parents=True)
    for name in ("search.nbc", "search.nbi"):
        (folder / "routing" / name).write_bytes(b"code")
    (folder / "for-0123456789abcdef").mkdir()
    (folder / "for-0123456789abcdef" / "mark").touch()
    os.utime(folder, (LONG_AGO, LONG_AGO))
    return folder


def test_code_of_other_sources_is_removed_when_nothing_has_used_it_for_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = aged(tmp_path / "pointsman-0123456789abcdef")
    recent = tmp_path / "pointsman-fedcba9876543210"
    recent.mkdir()
    (recent / "search.nbc").write_bytes(b"code")
    folder = cache_in(tmp_path, monkeypatch)
    assert not (stale / "routing" / "search.nbc").exists()
    assert not (stale / "routing" / "search.nbi").exists()
    assert not list(stale.glob("for-*/*"))  # marks say that there is code
    assert (recent / "search.nbc").exists()
    assert folder.exists()


def test_folder_that_goes_away_meanwhile_keeps_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = [aged(tmp_path / f"pointsman-{number:016x}") for number in range(3)]
    for folder in stale:
        (folder / "going").mkdir()
        os.utime(folder, (LONG_AGO, LONG_AGO))
        remove_when_listed(monkeypatch, folder / "going")
    cache_in(tmp_path, monkeypatch)
    assert not [file for folder in stale for file in folder.rglob("search.nb*")]


def test_sources_are_found_whatever_becomes_of_the_machine_code_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("b.py", "a.py", "inner/c.py"):
        (tmp_path / name).touch()
    kept = tmp_path / "__pycache__" / "pointsman-0123456789abcdef"
    kept.mkdir(parents=True)
    remove_when_listed(monkeypatch, kept)
    found = compiled.sources_below(tmp_path)
    assert found == [tmp_path / "a.py", tmp_path / "b.py", tmp_path / "inner" / "c.py"]


def test_nothing_but_our_own_folders_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = [
        aged(tmp_path / name)
        for name in ("pointsman", "pointsman-notes", "pointsman-0123456789ABCDEF", "routing_1c4c")
    ]
    target = aged(tmp_path / "elsewhere")
    link = tmp_path / "pointsman-0000000000000000"
    link.symlink_to(target)
    cache_in(tmp_path, monkeypatch)
    assert all((stranger / "routing" / "search.nbc").exists() for stranger in strangers)
    assert (target / "routing" / "search.nbc").exists()
    assert link.is_symlink()


def test_folder_of_a_process_that_still_runs_stays_so_that_it_can_compile_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = aged(tmp_path / "pointsman-0123456789abcdef")
    cache_in(tmp_path, monkeypatch)
    assert list((stale / "routing").iterdir()) == []


def test_folder_in_use_counts_as_recent_however_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache_in(tmp_path, monkeypatch)
    os.utime(folder, (LONG_AGO, LONG_AGO))
    assert cache_in(tmp_path, monkeypatch) == folder
    assert folder.stat().st_mtime > LONG_AGO + 3600.0


def test_base_that_cannot_be_made_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    assert compiled._cache_folder() is None


def test_marks_are_for_one_numba_and_one_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_FOLDER", cache_in(tmp_path, monkeypatch))
    here = compiled.kept_code()
    assert here is not None
    assert here == compiled.kept_code()
    monkeypatch.setattr(compiled.numba, "__version__", "0.0.1")
    other_numba = compiled.kept_code()
    monkeypatch.setattr(compiled.binding, "get_host_cpu_name", lambda: "cortex-a76")
    assert len({here, other_numba, compiled.kept_code()}) == 3


def test_nothing_is_marked_where_no_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_FOLDER", None)
    assert compiled.kept_code() is None
