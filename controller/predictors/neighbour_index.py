"""Nearest profiled prompts by inner product: exact while there are few, inverted lists beyond.

FAISS is imported when the first index is made, so that a controller without profiled prompts
starts without it.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

FLAT_UP_TO: Final = 10_000
"""Prompts searched exhaustively; 30 at once take about 8 ms there on one core."""

WANTED_RECALL: Final = 0.97
"""Share of the true 10 nearest that an approximate index must find among its own vectors; a little
more than is asked of it, since new prompts lie less well in its lists."""

_RECALL_QUERIES: Final = 200
_RECALL_AT: Final = 10
_TRAINING_PER_LIST: Final = 32
_PROBES: Final = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_KEPT_DIMENSIONS: Final = 192
"""Principal directions of the vectors that lists are made and searched by. Of all-MiniLM-L6-v2 they
hold 90 % of the energy, and the true 10 nearest are among the first 26 by them in 99.7 %."""

_FEW: Final = 256
"""Queries that one core answers sooner than two that have to be woken."""

_SPARE: Final = 16
"""Candidates beyond those wanted, since shortened similarities swap near ties."""


class NeighbourIndex(Protocol):
    """Vectors by position; positions count up from 0 in the order of `add`."""

    @property
    def size(self) -> int:
        """How many vectors there are."""
        ...

    @property
    def recall_at_10(self) -> float | None:
        """Measured share of the true 10 nearest found; None where the search is exact."""
        ...

    def add(self, vectors: FloatArray) -> None:
        """Append float32[n, dimension] vectors of length 1."""
        ...

    def search(
        self, queries: FloatArray, neighbours: int, vectors: FloatArray
    ) -> tuple[FloatArray, IntArray]:
        """The nearest vectors of each query.

        Args:
            queries: float32[R, dimension].
            neighbours: K.
            vectors: float32[size, dimension]; what was added, for the last ranking. An index does
                not keep a second copy of it.

        Returns:
            float32[R, K] similarities, falling along K, and int64[R, K] positions; K is the
            smaller of `neighbours` and `size`, and a position of -1 means no neighbour.
        """
        ...


class FlatIndex:
    """Exact search."""

    def __init__(self, dimension: int) -> None:
        self._index = _faiss().IndexFlatIP(dimension)

    @property
    def size(self) -> int:
        """How many vectors there are."""
        return int(self._index.ntotal)

    @property
    def recall_at_10(self) -> float | None:
        """None: nothing is missed."""
        return None

    def add(self, vectors: FloatArray) -> None:
        """Append vectors."""
        self._index.add(np.ascontiguousarray(vectors, dtype=np.float32))

    def search(
        self, queries: FloatArray, neighbours: int, vectors: FloatArray
    ) -> tuple[FloatArray, IntArray]:
        """The nearest vectors; nothing is missed."""
        is_small = self.size <= FLAT_UP_TO
        return _search(self._index, queries, min(neighbours, self.size), is_small=is_small)


@dataclass(frozen=True, slots=True)
class InvertedPlan:
    """How an inverted index is built.

    Attributes:
        lists: clusters of vectors.
        training_vectors: sampled for finding the clusters.
        iterations: of k-means.
        wanted_recall: the fewest lists are probed that reach it at the build.
    """

    lists: int
    training_vectors: int
    iterations: int = 6
    wanted_recall: float = WANTED_RECALL

    @classmethod
    def for_size(cls, vectors: int) -> "InvertedPlan":
        """About 4 * sqrt(n) lists, a power of two: the faster the search, the slower the build."""
        lists = max(16, 1 << round(np.log2(4.0 * np.sqrt(max(vectors, 64)))))
        return cls(lists=lists, training_vectors=min(vectors, _TRAINING_PER_LIST * lists))


class InvertedIndex:
    """Approximate search: only the lists nearest to the query are looked into.

    Vectors are kept there in their principal directions as 8-bit numbers, an eighth of the memory
    to read; the candidates are ranked by the vectors themselves at the end.
    """

    def __init__(
        self, index: Any, quantiser: Any, basis: FloatArray, scale: float, plan: InvertedPlan
    ) -> None:
        self._index = index
        self._quantiser = quantiser  # the index only borrows it
        self._basis = basis
        self._scale = np.float32(scale)
        self._recall = 0.0
        self._probes = 1
        self._plan = plan

    @classmethod
    def build(
        cls, vectors: FloatArray, rng: np.random.Generator, plan: InvertedPlan | None = None
    ) -> "InvertedIndex":
        """Cluster the vectors, add them all, then probe just enough lists for the wanted recall.

        Slow (a minute for a million): not for a thread that somebody waits for.

        Args:
            vectors: float32[n, dimension], length 1.
            rng: picks the training sample and the vectors that recall is measured with.
            plan: None takes one for this size.
        """
        faiss = _faiss()
        plan = plan or InvertedPlan.for_size(len(vectors))
        lists = min(plan.lists, len(vectors))
        plan = replace(plan, lists=lists, training_vectors=max(plan.training_vectors, lists))
        chosen = rng.choice(len(vectors), min(plan.training_vectors, len(vectors)), replace=False)
        sample = np.asarray(vectors[np.sort(chosen)], dtype=np.float32)
        basis = _principal_directions(sample, min(_KEPT_DIMENSIONS, vectors.shape[1]))
        shortened = np.ascontiguousarray(sample @ basis)
        quantiser = faiss.IndexFlatIP(basis.shape[1])
        index = faiss.IndexIVFScalarQuantizer(
            quantiser,
            basis.shape[1],
            lists,
            faiss.ScalarQuantizer.QT_8bit_direct_signed,
            faiss.METRIC_INNER_PRODUCT,
            False,  # the vectors themselves, not what is left after their cluster's centre
        )
        index.cp.niter = plan.iterations
        index.cp.seed = int(rng.integers(2**31))
        index.cp.min_points_per_centroid = 1
        index.cp.max_points_per_centroid = max(1, plan.training_vectors // lists)
        index.cp.spherical = True
        index.train(shortened)
        scale = 127.0 / max(float(np.abs(shortened).max()), 1e-6)
        built = cls(index, quantiser, basis, scale, plan)
        for start in range(0, len(vectors), 65_536):  # bounds the copies
            built.add(vectors[start : start + 65_536])
        built._tune(vectors, rng)
        return built

    @property
    def size(self) -> int:
        """How many vectors there are."""
        return int(self._index.ntotal)

    @property
    def recall_at_10(self) -> float | None:
        """Measured when it was built, on vectors of its own as queries (without themselves)."""
        return self._recall

    @property
    def probes(self) -> int:
        """Lists looked into for each query."""
        return self._probes

    @property
    def plan(self) -> InvertedPlan:
        """How it was built."""
        return self._plan

    def add(self, vectors: FloatArray) -> None:
        """Append vectors; clusters stay as they are."""
        self._index.add(self._whole(vectors))

    def search(
        self, queries: FloatArray, neighbours: int, vectors: FloatArray
    ) -> tuple[FloatArray, IntArray]:
        """The nearest vectors of the probed lists, in the order of their true similarities."""
        self._index.nprobe = self._probes
        wanted = min(neighbours, self.size)
        candidates_wanted = min(wanted + _SPARE, self.size)
        position = _search(self._index, self._whole(queries), candidates_wanted, is_small=True)[1]
        candidates = vectors[np.maximum(position, 0)]  # [R, K + spare, dimension]
        similarity = np.einsum("rkd,rd->rk", candidates, queries)
        similarity[position < 0] = -np.inf
        order = np.argsort(-similarity, axis=1, kind="stable")[:, :wanted]
        similarity = np.take_along_axis(similarity, order, axis=1)
        position = np.take_along_axis(position, order, axis=1)
        return np.where(position >= 0, similarity, np.float32(0.0)), position

    def _whole(self, vectors: FloatArray) -> FloatArray:
        """Principal components as whole numbers of 8 bits, which FAISS compares as such.

        A common factor changes no order, and a later vector with a greater component than any of
        the sample is cut, which the last ranking mends.
        """
        vectors = np.asarray(vectors, dtype=np.float32)
        if len(vectors) <= _FEW:
            # Not BLAS: waking its threads on a busy machine takes longer than this does.
            scaled = np.einsum("nd,dk->nk", vectors, self._basis) * self._scale
        else:
            scaled = vectors @ self._basis * self._scale
        whole: FloatArray = np.clip(np.rint(scaled), -127.0, 127.0)
        return whole

    def _tune(self, vectors: FloatArray, rng: np.random.Generator) -> None:
        count = min(_RECALL_QUERIES, len(vectors))
        picked = rng.choice(len(vectors), count, replace=False)
        queries = np.ascontiguousarray(vectors[picked], dtype=np.float32)
        wanted = min(_RECALL_AT + 1, len(vectors))
        exact = exact_search(vectors, queries, wanted)[1]
        for probes in (*(p for p in _PROBES if p < self._plan.lists), self._plan.lists):
            self._probes = probes
            found = self.search(queries, wanted, vectors)[1]
            self._recall = overlap_ratio(found, exact, without=picked)
            if self._recall >= self._plan.wanted_recall:
                return


def exact_search(
    vectors: FloatArray, queries: FloatArray, neighbours: int, block: int = 65_536
) -> tuple[FloatArray, IntArray]:
    """The nearest vectors by comparing with every one; what indexes are judged by.

    Returns:
        float32[R, K] similarities, falling along K, and int64[R, K] positions.
    """
    best_similarity = np.empty((len(queries), 0), dtype=np.float32)
    best_position = np.empty((len(queries), 0), dtype=np.int64)
    for start in range(0, len(vectors), block):
        part = np.asarray(vectors[start : start + block], dtype=np.float32)
        similarity = np.concatenate([best_similarity, queries @ part.T], axis=1)
        positions = np.broadcast_to(np.arange(start, start + len(part)), (len(queries), len(part)))
        position = np.concatenate([best_position, positions], axis=1)
        kept = min(neighbours, similarity.shape[1])
        top = np.argpartition(-similarity, kept - 1, axis=1)[:, :kept]
        best_similarity = np.take_along_axis(similarity, top, axis=1)
        best_position = np.take_along_axis(position, top, axis=1)
    order = np.argsort(-best_similarity, axis=1, kind="stable")
    return (
        np.take_along_axis(best_similarity, order, axis=1),
        np.take_along_axis(best_position, order, axis=1),
    )


def overlap_ratio(found: IntArray, wanted: IntArray, without: IntArray | None = None) -> float:
    """Share of the wanted positions of each row that were found there, on average.

    Args:
        found: int64[R, K].
        wanted: int64[R, K].
        without: int64[R]; a position of each row that does not count.
    """
    shares: list[float] = []
    for r, row in enumerate(wanted):
        left_out = set() if without is None else {int(without[r])}
        expected = set(row.tolist()) - left_out
        if expected:
            shares.append(len(expected & set(found[r].tolist())) / len(expected))
    return float(np.mean(shares)) if shares else 1.0


def _principal_directions(sample: FloatArray, kept: int) -> FloatArray:
    """float32[dimension, kept]; about the origin, since inner products are."""
    moments = sample.T.astype(np.float64) @ sample.astype(np.float64)
    return np.ascontiguousarray(np.linalg.eigh(moments)[1][:, ::-1][:, :kept], dtype=np.float32)


def _search(
    index: Any, queries: FloatArray, neighbours: int, *, is_small: bool
) -> tuple[FloatArray, IntArray]:
    if neighbours < 1 or len(queries) == 0:
        shape = (len(queries), 0)
        return np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.int64)
    faiss = _faiss()
    threads = faiss.omp_get_max_threads()  # of this thread only, as OpenMP has it
    if is_small and len(queries) <= _FEW:
        faiss.omp_set_num_threads(1)
    try:
        similarity, position = index.search(
            np.ascontiguousarray(queries, dtype=np.float32), int(neighbours)
        )
    finally:
        faiss.omp_set_num_threads(threads)
    # FAISS marks what it did not find with the least float.
    return np.where(position >= 0, similarity, np.float32(0.0)), position.astype(np.int64)


def _faiss() -> Any:
    import faiss

    # The BLAS of its wheels is five times slower here than its own loops, which have no such limit.
    faiss.cvar.distance_compute_blas_threshold = 1 << 30
    return faiss
