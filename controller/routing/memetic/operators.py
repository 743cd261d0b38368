"""Selection, crossover and mutation."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.routing.compiled import compiled_part, random_index, random_unit
from controller.routing.problem import FloatArray, IntArray


@compiled_part
def tournament(scores: FloatArray, size: int, state: NDArray[np.uint64]) -> Any:
    """int64: the index of the least score among `size` drawn with replacement."""
    winner = random_index(state, scores.size)
    for _ in range(size - 1):
        rival = random_index(state, scores.size)
        if scores[rival] < scores[winner]:
            winner = rival
    return winner


@compiled_part
def two_point_crossover(
    mother: IntArray, father: IntArray, state: NDArray[np.uint64], child: IntArray
) -> None:
    """Fill `child` with the mother's genes, and the father's between two drawn positions."""
    first = random_index(state, mother.size)
    last = random_index(state, mother.size)
    if first > last:
        first, last = last, first
    child[:] = mother
    child[first : last + 1] = father[first : last + 1]


@compiled_part
def mutate(
    x: IntArray,
    rate: float,
    legal: IntArray,
    counts: IntArray,
    state: NDArray[np.uint64],
) -> None:
    """Redraw each gene, with probability `rate`, among its feasible destinations."""
    for r in range(x.size):
        if random_unit(state) < rate:
            x[r] = legal[r, random_index(state, counts[r])]
