import numpy as np
import pytest

from controller.lab.bench.store import bench_store, rows_as_json, sample_embeddings
from controller.quality.neighbour_index import exact_search


def test_made_up_prompts_have_neighbours_as_real_ones_do() -> None:
    stored, asked = sample_embeddings(3000, 50, np.random.default_rng(0))
    assert np.linalg.norm(stored, axis=1) == pytest.approx(1.0, abs=1e-4)
    similarity = exact_search(stored, asked, 100)[0]
    assert 0.6 < similarity[:, 0].mean() < 0.9
    assert similarity[:, 99].mean() < 0.5


def test_a_small_store_is_measured() -> None:
    (row,) = rows_as_json(bench_store([200], repeats=1))
    assert row["recall_at_10"] > 0.99  # half precision swaps near ties
    assert row["index"] == "exact"
    assert row["lookup_milliseconds"] > 0.0
