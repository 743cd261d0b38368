"""The quality store on a real disk: crashes, damage and what survives."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from controller.quality.files import QualityFilesError, QualityFolder
from controller.quality.neighbour_index import GraphIndex
from controller.quality.store import QualityRecord, prompt_digest
from controller.quality.store_contents import InvalidRecordError

DIMENSION = 8


def record(prompt: int, score: float = 1.0, destination: str = "pi/small") -> QualityRecord:
    values = np.random.default_rng(prompt).standard_normal(DIMENSION)
    embedding = (values / np.linalg.norm(values)).astype(np.float32)
    return QualityRecord(prompt_digest(str(prompt)), embedding, destination, "small", score, 7)


def opened(folder: Path) -> QualityFolder:
    return QualityFolder(folder, DIMENSION)


def journal_of(folder: Path) -> Path:
    (journal,) = folder.glob("journal-*.bin")
    return journal


def test_records_survive_without_any_goodbye(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "sys.path[:0] = [sys.argv[2], sys.argv[3]]\n"
        "from pathlib import Path\n"
        "import test_quality_store as t\n"
        "folder = t.opened(Path(sys.argv[1]))\n"
        "folder.append([t.record(p) for p in range(5)])\n"
        "folder.compact()\n"
        "folder.append([t.record(5), t.record(0, 0.0)])\n"
        "os._exit(9)\n"
    )
    here = Path(__file__).parent
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(here), str(here.parents[1])],
        timeout=60,
        check=False,
    )
    assert ended.returncode == 9
    with opened(tmp_path) as folder:
        assert folder.report.prompts == len(folder.store) == folder.store.indexed_prompts == 6
        assert folder.report.journal_records == 2
        (column,) = folder.store.columns()
        assert column.mean_quality_ratio == pytest.approx((0.5 + 5) / 6)
        assert column.mean_output_tokens == 7.0


def test_answers_that_were_cut_survive_as_bounds(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.append([replace(record(0), score=None, was_cut=True)])
    for _ in range(2):
        with opened(tmp_path) as folder:
            assert folder.store.contents().tokens.tolist() == [[7.0]]
            assert folder.store.contents().token_counts.tolist() == [[0]]
            folder.compact()


def test_compacting_changes_nothing_but_the_files(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.append([record(p, p / 10) for p in range(10)])
        before = folder.store.contents()
        folder.compact()
        assert folder.journal_records == 0
        folder.compact()
    assert len(list(tmp_path.glob("generation-*"))) == 1
    with opened(tmp_path) as folder:
        after = folder.store.contents()
    assert (after.embeddings == before.embeddings).all()
    assert np.array_equal(after.scores, before.scores, equal_nan=True)
    assert after.destinations == before.destinations


@pytest.mark.parametrize("cut_bytes", [1, 20, 60])
def test_a_write_cut_short_is_dropped_and_reported(tmp_path: Path, cut_bytes: int) -> None:
    with opened(tmp_path) as folder:
        folder.append([record(1)])
        folder.append([record(2)])
    os.truncate(journal_of(tmp_path), journal_of(tmp_path).stat().st_size - cut_bytes)
    with opened(tmp_path) as folder:
        assert len(folder.store) == 1
        assert folder.report.lost_tail_bytes > 0
        folder.append([record(3)])
    with opened(tmp_path) as folder:
        assert len(folder.store) == 2
        assert folder.report.lost_tail_bytes == 0


@pytest.mark.parametrize("where", ["in the text", "in a length"])
def test_a_journal_damaged_in_the_middle_is_set_aside_whole_and_told(
    tmp_path: Path, where: str
) -> None:
    """Also when the damage makes the frame seem to reach beyond the end, like one cut short."""
    with opened(tmp_path) as folder:
        for prompt in range(3):
            folder.append([record(prompt)])
    journal = journal_of(tmp_path)
    whole = journal.read_bytes()
    data = bytearray(whole)
    frame_bytes = len(whole) // 3
    if where == "in the text":
        data[len(data) // 2] ^= 0xFF
    else:
        data[frame_bytes + 5] ^= 0x40  # of the second frame's length, in thousands of bytes
    journal.write_bytes(data)
    with capture_logs() as logs, opened(tmp_path) as folder:
        assert len(folder.store) == 1
        assert folder.report.set_aside is not None
        assert folder.report.set_aside.read_bytes() == data
        assert "quality.journal_damaged" in [entry["event"] for entry in logs]
    journal.write_bytes(whole[:frame_bytes] + b"?" + whole[frame_bytes:])
    with opened(tmp_path) as folder:
        assert folder.report.set_aside is not None
        aside = {path.name for path in folder.report.set_aside.parent.glob("*.damaged*")}
        assert len(aside) == 2, "the earlier copy is still there"


def test_a_journal_that_is_missing_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.append([record(1)])
        folder.compact()
        folder.append([record(2)])
    journal = journal_of(tmp_path)
    moved = journal.rename(journal.with_name("elsewhere"))
    with pytest.raises(QualityFilesError, match=f"{journal.name} is missing.*restore it"):
        opened(tmp_path)
    moved.rename(journal)
    with opened(tmp_path) as folder:
        assert len(folder.store) == 2


@pytest.mark.parametrize("name", ["embeddings.npy", "scores.npy", "manifest.json"])
def test_a_damaged_generation_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as folder:
        folder.append([record(p) for p in range(3)])
        folder.compact()
    (file,) = tmp_path.glob(f"generation-*/{name}")
    data = bytearray(file.read_bytes())
    data[-9:] = bytes(9)
    file.write_bytes(data)
    with pytest.raises(QualityFilesError, match="restore a copy"):
        opened(tmp_path)


def test_a_generation_of_another_schema_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.append([record(1)])
        folder.compact()
    (manifest,) = tmp_path.glob("generation-*/manifest.json")
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    with pytest.raises(QualityFilesError, match="schema version 7"):
        opened(tmp_path)


def test_a_lost_current_file_is_not_taken_for_an_empty_store(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.append([record(1)])
        folder.compact()
    (tmp_path / "CURRENT").unlink()
    with pytest.raises(QualityFilesError, match="no CURRENT file"):
        opened(tmp_path)


def test_a_folder_of_another_embedding_is_refused(tmp_path: Path) -> None:
    with QualityFolder(tmp_path, DIMENSION, embedding_model="one") as folder:
        folder.append([record(1)])
    for dimension, model in ((DIMENSION + 1, "one"), (DIMENSION, "two")):
        with pytest.raises(QualityFilesError, match="another embedding model"):
            QualityFolder(tmp_path, dimension, embedding_model=model)
    with QualityFolder(tmp_path, DIMENSION, embedding_model="one") as folder:
        assert len(folder.store) == 1
    (tmp_path / "store.json").write_text("{")
    with pytest.raises(QualityFilesError, match="restore a copy"):
        opened(tmp_path)


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(QualityFilesError, match="in use"):
        opened(tmp_path)


def test_a_refused_record_leaves_no_trace_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.append([record(1)])
        with pytest.raises(InvalidRecordError):
            folder.append([record(2), record(3, score=2.0)])
        folder.append([record(4)])
    with opened(tmp_path) as folder:
        assert len(folder.store) == 2


def test_a_full_disk_is_said_and_nothing_half_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as folder:
        folder.append([record(1)])
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(QualityFilesError, match="No space left"):
                folder.append([record(2)])
            with pytest.raises(QualityFilesError, match="No space left"):
                folder.compact()
        assert len(folder.store) == 1
        folder.append([record(3)])
    with opened(tmp_path) as folder:
        assert len(folder.store) == 2
        assert folder.report.lost_tail_bytes == 0


def test_a_file_where_the_folder_should_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QualityFilesError, match="name another folder"):
        opened(tmp_path / "file")


@pytest.mark.parametrize("harm", ["none", "damaged", "other index", "absent"])
def test_a_slow_index_is_kept_and_one_that_cannot_be_trusted_is_built_anew(
    tmp_path: Path, harm: str
) -> None:
    with QualityFolder(tmp_path, DIMENSION, flat_up_to=50) as folder:
        folder.append([record(p) for p in range(80)])
        build = folder.store.index_build()
        assert build is not None
        build.run()
        folder.store.adopt(build)
        folder.compact()
        folder.append([record(80)])
    (graph,) = tmp_path.glob("generation-*/graph.faiss")
    if harm == "damaged":
        graph.write_bytes(graph.read_bytes()[:-100])
    elif harm == "absent":
        graph.unlink()
    elif harm == "other index":
        other = GraphIndex.build(
            np.stack([record(p).embedding for p in range(100, 180)]), np.random.default_rng(0)
        )
        other.save(graph.parent)
        manifest = json.loads((graph.parent / "manifest.json").read_text())
        for name in manifest["index_sha256"]:
            data = (graph.parent / name).read_bytes()
            manifest["index_sha256"][name] = hashlib.sha256(data).hexdigest()
        (graph.parent / "manifest.json").write_text(json.dumps(manifest))
    with QualityFolder(tmp_path, DIMENSION, flat_up_to=50) as folder:
        store = folder.store
        assert store.indexed_prompts == len(store) == 81
        assert (store.recall_at_10 is not None) == (harm == "none")
        assert (store.index_build() is None) == (harm == "none")
        for prompt in (0, 79, 80):
            assert store.nearest(record(prompt).embedding[None], 1)[1][0, 0] == prompt
