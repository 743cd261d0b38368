from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from controller.quality.neighbour_index import (
    FlatIndex,
    GraphIndex,
    GraphPlan,
    exact_search,
    overlap_ratio,
)

DIMENSION = 16


def unit_vectors(count: int, seed: int = 0, clusters: int = 12) -> NDArray[np.float32]:
    """Points around a few directions, as prompts lie around topics; the seed moves the points."""
    centres = np.random.default_rng(100).standard_normal((clusters, DIMENSION))
    rng = np.random.default_rng(seed)
    points = centres[rng.integers(clusters, size=count)]
    points = points + 0.4 * rng.standard_normal((count, DIMENSION))
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    return np.asarray(unit, dtype=np.float32)


def test_the_flat_index_finds_what_comparing_with_each_finds() -> None:
    vectors, queries = unit_vectors(500), unit_vectors(7, seed=1)
    index = FlatIndex(DIMENSION)
    index.add(vectors[:200])
    index.add(vectors[200:])
    similarity, position = index.search(queries, 10, vectors)
    expected = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    assert (position == expected).all()
    assert similarity == pytest.approx(np.take_along_axis(queries @ vectors.T, expected, axis=1))
    assert index.recall_at_10 is None


def test_exact_search_in_blocks_is_the_same_as_at_once() -> None:
    vectors, queries = unit_vectors(300), unit_vectors(5, seed=1)
    whole, blocks = exact_search(vectors, queries, 8), exact_search(vectors, queries, 8, block=37)
    assert (whole[1] == blocks[1]).all()
    assert whole[0] == pytest.approx(blocks[0])


def test_an_index_gives_fewer_neighbours_than_asked_when_it_has_fewer() -> None:
    index = FlatIndex(DIMENSION)
    vectors = unit_vectors(4)
    assert index.search(unit_vectors(3), 10, vectors[:0])[1].shape == (3, 0)
    index.add(vectors)
    assert index.search(unit_vectors(3), 10, vectors)[1].shape == (3, 4)


def test_the_graph_reaches_its_recall_on_other_queries() -> None:
    vectors, queries = unit_vectors(4000), unit_vectors(50, seed=9)
    index = GraphIndex.build(vectors, np.random.default_rng(0))
    assert index.recall_at_10 is not None
    assert index.recall_at_10 >= 0.97
    similarity, found = index.search(queries, 10, vectors)
    assert overlap_ratio(found, exact_search(vectors, queries, 10)[1]) >= 0.95
    assert (np.diff(similarity, axis=1) <= 0.0).all()
    assert similarity == pytest.approx(np.einsum("rkd,rd->rk", vectors[found], queries), abs=1e-6)


def test_a_wider_beam_is_taken_for_more_recall() -> None:
    vectors = unit_vectors(3000, clusters=300)
    narrow, wide = (
        GraphIndex.build(
            vectors,
            np.random.default_rng(0),
            GraphPlan(links=4, build_beam=8, wanted_recall=wanted),
        )
        for wanted in (0.1, 0.9999)
    )
    assert narrow.beam < wide.beam


def test_the_graph_takes_more_vectors() -> None:
    vectors = unit_vectors(1000)
    index = GraphIndex.build(vectors[:900], np.random.default_rng(0))
    index.add(vectors[900:])
    assert index.size == 1000
    assert index.search(vectors[950:951], 1, vectors)[1][0, 0] == 950


def test_a_graph_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    vectors, queries = unit_vectors(800), unit_vectors(9, seed=4)
    index = GraphIndex.build(vectors, np.random.default_rng(0))
    names = index.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    loaded = GraphIndex.load(tmp_path)
    assert (loaded.search(queries, 10, vectors)[1] == index.search(queries, 10, vectors)[1]).all()
    assert (loaded.beam, loaded.recall_at_10) == (index.beam, index.recall_at_10)


def test_a_graph_knows_its_vectors_from_others() -> None:
    vectors = unit_vectors(800)
    index = GraphIndex.build(vectors, np.random.default_rng(0))
    assert index.agrees_with(vectors, np.random.default_rng(1))
    assert not index.agrees_with(vectors[:-1], np.random.default_rng(1))
    assert not index.agrees_with(vectors[::-1], np.random.default_rng(1))


@pytest.mark.parametrize("name", ["graph.faiss", "graph.npz"])
def test_a_damaged_graph_file_is_no_index(tmp_path: Path, name: str) -> None:
    GraphIndex.build(unit_vectors(100), np.random.default_rng(0)).save(tmp_path)
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError):
        GraphIndex.load(tmp_path)


def test_overlap_counts_what_was_found() -> None:
    found, wanted = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[3, 2, 9], [4, 5, 6]])
    assert overlap_ratio(found, wanted) == pytest.approx((2 / 3 + 1.0) / 2)
    assert overlap_ratio(found, wanted, without=np.array([9, 4])) == 1.0
