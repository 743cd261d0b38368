"""Nearest profiled prompts by inner product: exact while there are few, along a graph beyond.

FAISS is imported when the first index is made, so that a controller without profiled prompts
starts without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
Vectors = NDArray[np.float16] | NDArray[np.float32]
IntArray = NDArray[np.int64]

FLAT_UP_TO: Final = 10_000
"""Prompts searched exhaustively; 30 at once take about 8 ms there on one core."""

WANTED_RECALL: Final = 0.97
"""Share of the true 10 nearest that an approximate index must find among its own vectors; a little
more than is asked of it, since the way to new prompts is less well known."""

_RECALL_QUERIES: Final = 200
_RECALL_AT: Final = 10
_FITTED_VECTORS: Final = 20_000
_BEAMS: Final = (64, 96, 128, 192, 256, 512)
_AGREEING: Final = 64
_LEAST_AGREEMENT: Final = 0.9
_GRAPH_FILE: Final = "graph.faiss"
_PARTS_FILE: Final = "graph.npz"
_BLOCK: Final = 4_096
"""Vectors turned into 32-bit numbers at once, which bounds the copies to some megabytes."""

_KEPT_DIMENSIONS: Final = 192
"""Principal directions of the vectors that the graph is made and searched by. Of all-MiniLM-L6-v2
they hold 90 % of the energy, and the true 10 nearest are among the first 26 by them in 99.7 %."""

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

    def add(self, vectors: Vectors) -> None:
        """Append float[n, dimension] vectors of length 1."""
        ...

    def search(
        self, queries: FloatArray, neighbours: int, vectors: Vectors
    ) -> tuple[FloatArray, IntArray]:
        """The nearest vectors of each query.

        Args:
            queries: float32[R, dimension].
            neighbours: K.
            vectors: float[size, dimension]; what was added, for the last ranking. An index does
                not keep a second copy of it.

        Returns:
            float32[R, K] similarities, falling along K, and int64[R, K] positions; K is the
            smaller of `neighbours` and `size`, and a position of -1 means no neighbour.
        """
        ...


class FlatIndex:
    """Exact search.

    FAISS searches a copy of its own, the faster way, while there are few vectors. Beyond
    `FLAT_UP_TO`, where an approximate index is on its way, such a copy would take more memory than
    everything else, so the vectors themselves are compared, block by block.
    """

    def __init__(self, dimension: int) -> None:
        self._copy: Any = _faiss().IndexFlatIP(dimension)
        self._size = 0

    @property
    def size(self) -> int:
        """How many vectors there are."""
        return self._size

    @property
    def recall_at_10(self) -> float | None:
        """None: nothing is missed."""
        return None

    def add(self, vectors: Vectors) -> None:
        """Append vectors."""
        self._size += len(vectors)
        if self._size > FLAT_UP_TO:
            self._copy = None
        if self._copy is not None:
            self._copy.add(np.ascontiguousarray(vectors, dtype=np.float32))

    def search(
        self, queries: FloatArray, neighbours: int, vectors: Vectors
    ) -> tuple[FloatArray, IntArray]:
        """The nearest vectors; nothing is missed."""
        wanted = min(neighbours, self._size)
        if self._copy is not None:
            return _search(self._copy, queries, wanted)
        return exact_search(vectors, queries, wanted)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How a graph index is built.

    Attributes:
        links: of each vector, to others near it; twice as many in the lowest layer.
        build_beam: candidates kept while a vector is placed.
        wanted_recall: the narrowest search beam is used that reaches it at the build.
    """

    links: int = 16
    build_beam: int = 40
    wanted_recall: float = WANTED_RECALL


class GraphIndex:
    """Approximate search along a graph of near vectors (HNSW, Malkov and Yashunin 2016).

    Vectors are kept there in their principal directions as 8-bit numbers, an eighth of the memory
    to read; the candidates are ranked by the vectors themselves at the end. Built by several
    threads, so two builds differ in a few links.
    """

    def __init__(self, index: Any, basis: FloatArray, scale: float) -> None:
        self._index = index
        self._basis = basis
        self._scale = np.float32(scale)
        self._recall = 0.0
        self._beam = _BEAMS[0]

    @classmethod
    def build(
        cls, vectors: Vectors, rng: np.random.Generator, plan: GraphPlan | None = None
    ) -> "GraphIndex":
        """Place every vector, then widen the search just enough for the wanted recall.

        Slow (two minutes for a million): not for a thread that somebody waits for.

        Args:
            vectors: float[n, dimension], length 1.
            rng: picks the vectors that directions are fitted to and recall is measured with.
            plan: None takes the default.
        """
        faiss = _faiss()
        plan = plan or GraphPlan()
        chosen = rng.choice(len(vectors), min(_FITTED_VECTORS, len(vectors)), replace=False)
        sample = vectors[np.sort(chosen)]
        basis = _principal_directions(sample, min(_KEPT_DIMENSIONS, vectors.shape[1]))
        greatest = max(float(np.abs(part @ basis).max()) for part in _blocks(sample, np.float32))
        scale = 127.0 / max(greatest, 1e-6)
        index = faiss.IndexHNSWSQ(
            basis.shape[1],
            faiss.ScalarQuantizer.QT_8bit_direct_signed,
            plan.links,
            faiss.METRIC_INNER_PRODUCT,
        )
        index.hnsw.efConstruction = plan.build_beam
        built = cls(index, basis, scale)
        index.train(built._whole(sample[:1]))  # nothing to learn, but it asks for it
        built.add(vectors)
        built._tune(vectors, rng, plan.wanted_recall)
        return built

    @classmethod
    def load(cls, folder: Path) -> "GraphIndex":
        """The index that `save` wrote there.

        Raises:
            ValueError: what is there is no index.
            OSError: it cannot be read.
        """
        with np.load(folder / _PARTS_FILE, allow_pickle=False) as parts:
            try:
                basis, scale = parts["basis"], float(parts["scale"])
                recall, beam = float(parts["recall"]), int(parts["beam"])
            except KeyError as error:
                raise ValueError(f"{folder / _PARTS_FILE} lacks {error}") from error
        try:
            index = _faiss().read_index(str(folder / _GRAPH_FILE))
        except RuntimeError as error:  # what FAISS raises for a damaged or absent file
            raise ValueError(f"{folder / _GRAPH_FILE} is no index: {error}") from error
        if index.d != basis.shape[1]:
            raise ValueError(f"{folder} holds parts of two indexes")
        loaded = cls(index, basis, scale)
        loaded._recall, loaded._beam = recall, beam
        return loaded

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write the index into a folder and return the names of the files.

        Raises:
            OSError: they cannot be written.
        """
        np.savez(
            folder / _PARTS_FILE,
            basis=self._basis,
            scale=self._scale,
            recall=np.float64(self._recall),
            beam=np.int64(self._beam),
        )
        try:
            _faiss().write_index(self._index, str(folder / _GRAPH_FILE))
        except RuntimeError as error:  # what FAISS raises for a full disk
            raise OSError(str(error)) from error
        return _PARTS_FILE, _GRAPH_FILE

    @property
    def size(self) -> int:
        """How many vectors there are."""
        return int(self._index.ntotal)

    @property
    def recall_at_10(self) -> float | None:
        """Measured when it was built, on vectors of its own as queries (without themselves)."""
        return self._recall

    @property
    def beam(self) -> int:
        """Candidates kept during a search."""
        return self._beam

    def agrees_with(self, vectors: Vectors, rng: np.random.Generator) -> bool:
        """Whether these are the vectors that were added, judged by the places of a few."""
        if self.size != len(vectors) or self._basis.shape[0] != vectors.shape[1]:
            return False
        picked = rng.choice(len(vectors), min(_AGREEING, len(vectors)), replace=False)
        asked = vectors[picked].astype(np.float32)
        found = self.search(asked, _RECALL_AT, vectors)[1]
        # Equal vectors share a place, and a graph may miss one now and then.
        hits = sum(int(row) in found[n].tolist() for n, row in enumerate(picked))
        return hits >= _LEAST_AGREEMENT * len(picked)

    def add(self, vectors: Vectors) -> None:
        """Append vectors."""
        for part in _blocks(vectors, np.float32):
            self._index.add(self._whole(part))

    def search(
        self, queries: FloatArray, neighbours: int, vectors: Vectors
    ) -> tuple[FloatArray, IntArray]:
        """The nearest vectors that the graph leads to, in the order of their true similarities."""
        wanted = min(neighbours, self.size)
        candidates_wanted = min(wanted + _SPARE, self.size)
        self._index.hnsw.efSearch = max(self._beam, candidates_wanted)
        position = _search(self._index, self._whole(queries), candidates_wanted)[1]
        candidates = vectors[np.maximum(position, 0)].astype(
            np.float32
        )  # [R, K + spare, dimension]
        similarity = np.einsum("rkd,rd->rk", candidates, queries)
        similarity[position < 0] = -np.inf
        order = np.argsort(-similarity, axis=1, kind="stable")[:, :wanted]
        similarity = np.take_along_axis(similarity, order, axis=1)
        position = np.take_along_axis(position, order, axis=1)
        return np.where(position >= 0, similarity, np.float32(0.0)), position

    def _whole(self, vectors: Vectors) -> FloatArray:
        """Principal components as whole numbers of 8 bits, which FAISS compares as such.

        A common factor changes no order, and a later vector with a greater component than any of
        the sample is cut, which the last ranking mends.
        """
        exact = np.asarray(vectors, dtype=np.float32)
        if len(exact) <= _FEW:
            # Not BLAS: waking its threads on a busy machine takes longer than this does.
            scaled = np.einsum("nd,dk->nk", exact, self._basis) * self._scale
        else:
            scaled = exact @ self._basis * self._scale
        whole: FloatArray = np.clip(np.rint(scaled), -127.0, 127.0)
        return whole

    def _tune(self, vectors: Vectors, rng: np.random.Generator, wanted_recall: float) -> None:
        picked = rng.choice(len(vectors), min(_RECALL_QUERIES, len(vectors)), replace=False)
        queries = vectors[picked].astype(np.float32)
        wanted = min(_RECALL_AT + 1, len(vectors))
        exact = exact_search(vectors, queries, wanted)[1]
        for beam in _BEAMS:
            self._beam = beam
            found = self.search(queries, wanted, vectors)[1]
            self._recall = overlap_ratio(found, exact, without=picked)
            if self._recall >= wanted_recall:
                return


def exact_search(
    vectors: Vectors, queries: FloatArray, neighbours: int, block: int = _BLOCK
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


def _blocks(vectors: Vectors, kind: type[np.floating[Any]]) -> Iterator[NDArray[Any]]:
    for start in range(0, len(vectors), _BLOCK):
        yield np.asarray(vectors[start : start + _BLOCK], dtype=kind)


def _principal_directions(sample: Vectors, kept: int) -> FloatArray:
    """float32[dimension, kept]; about the origin, since inner products are."""
    moments = np.zeros((sample.shape[1], sample.shape[1]))
    for part in _blocks(sample, np.float64):
        moments += part.T @ part
    return np.ascontiguousarray(np.linalg.eigh(moments)[1][:, ::-1][:, :kept], dtype=np.float32)


def _search(index: Any, queries: FloatArray, neighbours: int) -> tuple[FloatArray, IntArray]:
    if neighbours < 1 or len(queries) == 0:
        shape = (len(queries), 0)
        return np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.int64)
    faiss = _faiss()
    threads = faiss.omp_get_max_threads()  # of this thread only, as OpenMP has it
    if len(queries) <= _FEW:
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
