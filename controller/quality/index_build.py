"""Which prompts of a quality store stay, and the index that is built of them meanwhile."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.quality.neighbour_index import FlatIndex, GraphIndex, NeighbourIndex

FloatArray = NDArray[np.float64]

_KEPT_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """What a store may hold; the prompts that were silent longest go first.

    Attributes:
        max_prompts: when there are more, a tenth less than this are kept, so that the next one does
            not cost an index again.
        oldest_time: seconds since 1970; prompts without an outcome since then go.
    """

    max_prompts: int
    oldest_time: float = -math.inf


class IndexBuild:
    """An index of the prompts that stay; `run` it off the event loop, then let the store adopt it.

    Args:
        vectors: float16[n, dimension] of the prompts that stay.
        rows: int64[n]; where they are in the store now.
        seen_times: float64[m] of all m prompts that the store has now; later ones stay as well.
        is_graph: False searches exactly.
        seed: of the graph's directions and its measured recall.
    """

    def __init__(
        self,
        vectors: NDArray[np.float16],
        rows: NDArray[np.int64],
        seen_times: FloatArray,
        is_graph: bool,
        seed: int,
    ) -> None:
        self._vectors = vectors
        self._is_graph = is_graph
        self._seed = seed
        self._seen_times = seen_times
        self.rows = rows
        self.index: NeighbourIndex | None = None

    @property
    def seen_rows(self) -> int:
        """Prompts that the store had when this was begun."""
        return len(self._seen_times)

    @property
    def dropped_prompts(self) -> int:
        """Prompts that the store will no longer hold."""
        return self.seen_rows - len(self.rows)

    def is_heard_again(self, seen_times: FloatArray) -> NDArray[np.bool_]:
        """bool[m]; which of the prompts have had an outcome since this was begun."""
        is_heard: NDArray[np.bool_] = seen_times[: self.seen_rows] != self._seen_times
        return is_heard

    def run(self) -> None:
        """Build; a graph of a million prompts takes about three minutes."""
        if self._is_graph:
            self.index = GraphIndex.build(self._vectors, np.random.default_rng(self._seed))
        else:
            self.index = FlatIndex(self._vectors.shape[1])
            self.index.add(self._vectors)


def kept_rows(seen_times: FloatArray, bounds: StoreBounds | None) -> NDArray[np.int64]:
    """Rows that the bounds allow, rising."""
    if bounds is None:
        return np.arange(len(seen_times))
    rows = np.flatnonzero(seen_times >= bounds.oldest_time)
    if len(rows) > bounds.max_prompts:
        dropped = len(rows) - int(_KEPT_SHARE * bounds.max_prompts)
        by_age = np.argsort(seen_times[rows], kind="stable")  # of equal times the first to come
        rows = np.sort(rows[by_age[dropped:]])
    return rows
