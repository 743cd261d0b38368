"""The quality store on disks that are full or read-only, and under SIGKILL."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.quality.files import QualityFilesError, QualityFolder
from tests.fakes.small_disk import fill, remount, small_disk
from tests.integration.test_quality_store import opened, record


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "256k") as folder:
        yield folder


def why_not_appended(folder: QualityFolder, prompt: int) -> str:
    try:
        folder.append([record(prompt)])
    except QualityFilesError as error:
        return str(error)
    return ""


@pytest.mark.privileged
def test_on_a_full_disk_nothing_is_half_kept_and_all_goes_on_once_there_is_space(
    disk: Path,
) -> None:
    with opened(disk) as folder:
        folder.append([record(p) for p in range(20)])
        folder.compact()
        ballast = fill(disk)
        kept = 20
        while not (why := why_not_appended(folder, kept)):  # the last page may have room
            kept += 1
        assert "No space left" in why
        assert "free space" in why
        with pytest.raises(QualityFilesError, match="No space left"):
            folder.compact()
        assert len(folder.store) == folder.store.indexed_prompts == kept
        ballast.unlink()
        folder.append([record(1000)])
        folder.compact()
        folder.append([record(1001)])
    with opened(disk) as folder:
        assert len(folder.store) == folder.store.indexed_prompts == kept + 2
        assert folder.report.lost_tail_bytes == 0


@pytest.mark.privileged
def test_a_full_disk_at_the_start_is_said(disk: Path) -> None:
    fill(disk)
    with pytest.raises(QualityFilesError, match=r"No space left.*free space"):
        opened(disk)


@pytest.mark.privileged
def test_a_read_only_disk_is_said_at_the_start(disk: Path) -> None:
    with opened(disk) as folder:
        folder.append([record(p) for p in range(3)])
    remount(disk, "ro")
    with pytest.raises(QualityFilesError, match=r"Read-only file system.*permissions"):
        opened(disk)
    remount(disk, "rw")
    with opened(disk) as folder:
        assert len(folder.store) == 3


@pytest.mark.parametrize("flush", [1, 4, 7, 8, 9, 10, 11])
def test_killed_in_the_middle_of_compacting_it_has_everything(tmp_path: Path, flush: int) -> None:
    """SIGKILL at each kind of moment: in the arrays, the manifest, the journal, CURRENT."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.integration.test_quality_store import opened, record\n"
        "folder = opened(Path(sys.argv[1]))\n"
        "folder.append([record(p) for p in range(30)])\n"
        "folder.compact()\n"
        "folder.append([record(p) for p in range(30, 40)])\n"
        "flush, left = os.fsync, [int(sys.argv[2])]\n"
        "def fsync(descriptor):\n"
        "    flush(descriptor)\n"
        "    left[0] -= 1\n"
        "    if not left[0]:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.fsync = fsync\n"
        "folder.compact()\n"
        "raise SystemExit('it was not killed')\n"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(flush)],
        cwd=root, timeout=60, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == -9, ended.stderr
    with opened(tmp_path) as folder:
        assert len(folder.store) == folder.store.indexed_prompts == 40
        assert folder.report.lost_tail_bytes == 0
        assert folder.report.set_aside is None
        folder.append([record(40)])
        folder.compact()
    with opened(tmp_path) as folder:
        assert len(folder.store) == 41
    assert len(list(tmp_path.glob("generation-*"))) == 1
