"""What the quality store drops, and that its files, its rows and its index then agree."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from controller.quality.files import QualityFolder
from controller.quality.index_build import StoreBounds
from controller.quality.predictor import QualityPredictor, QualityRetention
from tests.integration.test_quality_store import DIMENSION, journal_of, opened, record

DAY = 86_400.0


class NoEmbedding:
    """Nobody asks for one."""

    name, model, dimension = "none/none", "none", DIMENSION

    def embed(self, texts):  # type: ignore[no-untyped-def]
        raise AssertionError(texts)


@pytest.mark.parametrize("flat_up_to", [1000, 30])
def test_what_was_dropped_stays_dropped_over_a_restart(tmp_path: Path, flat_up_to: int) -> None:
    now = time.time()
    with QualityFolder(tmp_path, DIMENSION, flat_up_to) as folder:
        for age in range(80):
            folder.append([record(age)], now - age * DAY - 1.0)
        retention = QualityRetention(max_prompts=70, days=50.0)
        assert QualityPredictor(NoEmbedding(), folder, retention).maintain() == 30
        assert len(folder.store) == folder.store.indexed_prompts == 50
    with QualityFolder(tmp_path, DIMENSION, flat_up_to) as folder:
        store = folder.store
        assert len(store) == store.indexed_prompts == 50
        assert (store.recall_at_10 is None) == (flat_up_to > 50)
        for age in (0, 49):
            assert store.nearest(record(age).embedding[None], 1)[0][0, 0] > 0.999
        retention = QualityRetention(max_prompts=40)
        assert QualityPredictor(NoEmbedding(), folder, retention).maintain() == 14
        assert sorted(store.contents().digests.tolist()) == sorted(
            list(record(age).prompt_digest) for age in range(36)
        )


def test_nothing_is_dropped_until_the_new_generation_is_written(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.append([record(p) for p in range(20)], 1000.0)
        build = folder.store.index_build(bounds=StoreBounds(max_prompts=10))
        assert build is not None
        build.run()
        folder.store.adopt(build)  # and the controller is killed before it compacts
    with opened(tmp_path) as folder:
        assert len(folder.store) == 20


def test_times_survive_compacting_and_the_journal(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.append([record(1)], 1000.0)
        folder.compact()
        folder.append([record(2)], 2000.0)
    with opened(tmp_path) as folder:
        assert folder.store.contents().seen_times.tolist() == [1000.0, 2000.0]


def test_what_was_kept_without_a_time_counts_as_seen_when_it_is_read(tmp_path: Path) -> None:
    """Folders of before had none; nothing in them is dropped for its age at once."""
    with opened(tmp_path) as folder:
        folder.append([record(1), record(2)], 1000.0)
        folder.compact()
    (manifest,) = tmp_path.glob("generation-*/manifest.json")
    told = json.loads(manifest.read_text())
    del told["sha256"]["seen_times"]
    manifest.write_text(json.dumps(told))
    (manifest.parent / "seen_times.npy").unlink()
    started = time.time()
    with opened(tmp_path) as folder:
        times = folder.store.contents().seen_times
        assert times is not None
        assert np.all((times >= started) & (times <= time.time()))
        assert journal_of(tmp_path).stat().st_size == 0
