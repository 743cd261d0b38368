import numpy as np
import pytest
from numpy.typing import NDArray

from controller.predictors.neighbour_index import (
    FlatIndex,
    InvertedIndex,
    InvertedPlan,
    exact_search,
    overlap_ratio,
)

DIMENSION = 16


def unit_vectors(count: int, seed: int = 0, clusters: int = 12) -> NDArray[np.float32]:
    """Points around a few directions, as prompts lie around topics."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((clusters, DIMENSION))
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


def test_the_inverted_index_reaches_its_recall_on_other_queries() -> None:
    vectors, queries = unit_vectors(4000), unit_vectors(50, seed=9)
    index = InvertedIndex.build(vectors, np.random.default_rng(0))
    assert index.recall_at_10 is not None
    assert index.recall_at_10 >= 0.95
    found = index.search(queries, 10, vectors)[1]
    assert overlap_ratio(found, exact_search(vectors, queries, 10)[1]) >= 0.9
    assert index.probes < index.plan.lists


def test_the_inverted_index_is_the_same_for_the_same_seed() -> None:
    vectors, queries = unit_vectors(2000), unit_vectors(5, seed=9)
    found = [
        InvertedIndex.build(vectors, np.random.default_rng(3)).search(queries, 10, vectors)[1]
        for _ in range(2)
    ]
    assert (found[0] == found[1]).all()


def test_the_inverted_index_takes_more_vectors() -> None:
    vectors = unit_vectors(1000)
    index = InvertedIndex.build(vectors[:900], np.random.default_rng(0))
    index.add(vectors[900:])
    assert index.size == 1000
    assert index.search(vectors[950:951], 1, vectors)[1][0, 0] == 950


def test_lists_grow_with_the_square_root() -> None:
    assert InvertedPlan.for_size(1_000_000).lists == 4096
    assert InvertedPlan.for_size(10).lists >= 16


def test_overlap_counts_what_was_found() -> None:
    found, wanted = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[3, 2, 9], [4, 5, 6]])
    assert overlap_ratio(found, wanted) == pytest.approx((2 / 3 + 1.0) / 2)
    assert overlap_ratio(found, wanted, without=np.array([9, 4])) == 1.0
