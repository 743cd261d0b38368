"""Decision trees laid out so that a walk touches little memory, and the compiled walks.

A decision comes once a second, and the embedding before it pushes the trees out of the caches, so
its time is that of fetching them. Here a node has 16 bytes, and its left child follows it.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.routing.compiled import compiled_part, compiled_without_gil

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]
SetArray = NDArray[np.uint64]

_LEAF: Final = -1

MISSING_BITS: Final = 3
"""Of a test; the column stands above them."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTrees:
    """The nodes of trees, each tree in preorder.

    Attributes:
        roots: int32[T].
        tests: int32[nodes, 2]. Of an inner node: column * 8 + how it treats what is missing, and
            its right child. Of a leaf: -1, and its row of `values`.
        numbers: float64[nodes]; the threshold, or of a leaf its first value.
        values: float64[rows, outputs].
        largest: nodes of the largest tree.
    """

    roots: IntArray
    tests: IntArray
    numbers: FloatArray
    values: FloatArray
    largest: int


@dataclass(frozen=True, slots=True, eq=False)
class PreparedEnds:
    """Trees whose last columns can only be those of K ends.

    Attributes:
        packed: the trees.
        count: K.
        first: columns before the last ones.
        tests: int32[nodes, 2]; as of the trees, but a test of a last column is the row of `sets`
            that it parts the ends by, behind the tests of the first ones.
        sets: uint64[S, ceil(K / 64)]; the bit of an end is set where it goes left. Thousands of
            tests part a hundred ends in few ways.
    """

    packed: PackedTrees
    count: int
    first: int
    tests: IntArray
    sets: SetArray


def pack_trees(
    roots: IntArray,
    feature: IntArray,
    threshold: FloatArray,
    left: IntArray,
    right: IntArray,
    missing: IntArray,
    values: FloatArray,
) -> PackedTrees:
    """Lay out the arrays of a `TreeEnsemble`; each node must have one parent at most."""
    tests = np.zeros((feature.shape[0], 2), dtype=np.int32)
    numbers = np.zeros(feature.shape[0])
    starts = np.zeros_like(roots)
    used = _lay_out(roots, feature, threshold, left, right, missing, values, starts, tests, numbers)
    sizes = np.diff(np.append(starts, used))
    return PackedTrees(starts, tests[:used], numbers[:used], values, int(sizes.max()))


def sums_of_rows(trees: PackedTrees, rows: FloatArray) -> FloatArray:
    """float64[n, outputs]: for each of float64[n, columns] the sum of its leaves."""
    found = np.zeros((rows.shape[0], trees.values.shape[1]))
    _add_leaves(rows, trees.roots, trees.tests, trees.numbers, trees.values, found)
    return found


def prepare_ends(trees: PackedTrees, first: int, ends: FloatArray) -> PreparedEnds:
    """Part the ends, float64[K, last columns], at each test of a column from `first` on."""
    words = max(1, -(-ends.shape[0] // 64))
    tests = trees.tests.copy()
    sets = np.zeros((tests.shape[0], words), dtype=np.uint64)
    used = _part_ends(ends, first, trees.numbers, tests, sets)
    return PreparedEnds(trees, ends.shape[0], first, tests, sets[:used].copy())


def sums_of_sets(prepared: PreparedEnds, starts: FloatArray) -> FloatArray:
    """float64[Q, K]: the first value of the leaves of each start joined with each end, summed."""
    found = np.zeros((starts.shape[0], prepared.count))
    trees = prepared.packed
    _add_leaves_of_sets(
        starts, trees.roots, prepared.tests, trees.numbers, prepared.sets, trees.largest, found
    )
    return found


@compiled_part
def _is_left(value: float, threshold: float, missing: int) -> bool:
    kind = missing & 3
    if kind == 2:
        is_missing = np.isnan(value)
    else:
        if np.isnan(value):
            value = 0.0
        # LightGBM's own bound for what counts as zero.
        is_missing = kind == 1 and -1e-35 <= value <= 1e-35
    if is_missing:
        return missing & 4 != 0
    return value <= threshold


@compiled_without_gil
def _lay_out(
    roots: IntArray,
    feature: IntArray,
    threshold: FloatArray,
    left: IntArray,
    right: IntArray,
    missing: IntArray,
    values: FloatArray,
    starts: IntArray,
    tests: IntArray,
    numbers: FloatArray,
) -> int:
    used = 0
    waiting = np.empty((feature.shape[0] + 1, 2), dtype=np.int32)  # a node, and whose right child
    for tree in range(roots.shape[0]):
        starts[tree] = used
        waiting[0, 0] = roots[tree]
        waiting[0, 1] = -1
        height = 1
        while height:
            height -= 1
            node = waiting[height, 0]
            if waiting[height, 1] >= 0:
                tests[waiting[height, 1], 1] = used
            if feature[node] < 0:
                tests[used, 0] = _LEAF
                tests[used, 1] = node
                numbers[used] = values[node, 0]
            else:
                tests[used, 0] = (feature[node] << MISSING_BITS) | missing[node]
                numbers[used] = threshold[node]
                waiting[height, 0] = right[node]
                waiting[height, 1] = used
                waiting[height + 1, 0] = left[node]
                waiting[height + 1, 1] = -1
                height += 2
            used += 1
    return used


@compiled_without_gil
def _add_leaves(
    rows: FloatArray,
    roots: IntArray,
    tests: IntArray,
    numbers: FloatArray,
    values: FloatArray,
    found: FloatArray,
) -> None:
    # Tree by tree, so that a tree's nodes stay in the nearest cache while all rows pass it.
    for tree in range(roots.shape[0]):
        root = roots[tree]
        for row in range(rows.shape[0]):
            node = root
            test = tests[node, 0]
            while test >= 0:
                if _is_left(rows[row, test >> MISSING_BITS], numbers[node], test & 7):
                    node += 1
                else:
                    node = tests[node, 1]
                test = tests[node, 0]
            leaf = tests[node, 1]
            for output in range(values.shape[1]):
                found[row, output] += values[leaf, output]


@compiled_without_gil
def _part_ends(
    ends: FloatArray, first: int, numbers: FloatArray, tests: IntArray, sets: SetArray
) -> int:
    used = 0
    words = sets.shape[1]
    members = np.empty(words, dtype=np.uint64)
    for node in range(tests.shape[0]):
        test = tests[node, 0]
        column = (test >> MISSING_BITS) - first
        if test < 0 or column < 0:
            continue
        members[:] = 0
        for end in range(ends.shape[0]):
            if _is_left(ends[end, column], numbers[node], test & 7):
                members[end >> 6] |= np.uint64(1) << np.uint64(end & 63)
        at = 0
        while at < used:
            word = 0
            while word < words and sets[at, word] == members[word]:
                word += 1
            if word == words:
                break
            at += 1
        if at == used:
            sets[used] = members
            used += 1
        tests[node, 0] = (first << MISSING_BITS) + at
    return used


# Where the only bit of a word is, from six bits of its product with a de Bruijn sequence.
# Source: Leiserson, Prokop, Randall, "Using de Bruijn Sequences to Index a 1 in a Computer Word",
# 1998.
_DE_BRUIJN: Final = np.uint64(0x03F79D71B4CB0A89)
_TOP_SIX: Final = np.uint64(58)


def _bit_positions() -> NDArray[np.int64]:
    found = np.zeros(64, dtype=np.int64)
    for bit in range(64):
        product = (int(_DE_BRUIJN) << bit) & (2**64 - 1)
        found[product >> int(_TOP_SIX)] = bit
    return found


_POSITION: Final = _bit_positions()


@compiled_without_gil
def _add_leaves_of_sets(
    starts: FloatArray,
    roots: IntArray,
    tests: IntArray,
    numbers: FloatArray,
    sets: SetArray,
    deepest: int,
    found: FloatArray,
) -> None:
    words = sets.shape[1]
    count = found.shape[1]
    first_set = starts.shape[1] << MISSING_BITS
    one = np.uint64(1)
    waiting = np.empty(deepest + 1, dtype=np.int32)
    waiting_sets = np.empty((deepest + 1, words), dtype=np.uint64)
    members = np.empty(words, dtype=np.uint64)
    for start in range(starts.shape[0]):
        for tree in range(roots.shape[0]):
            waiting[0] = roots[tree]
            for word in range(words):
                last = min(64, count - 64 * word)
                waiting_sets[0, word] = (
                    ~np.uint64(0) if last == 64 else (one << np.uint64(max(last, 0))) - one
                )
            height = 1
            while height:
                height -= 1
                node = waiting[height]
                for word in range(words):
                    members[word] = waiting_sets[height, word]
                test = tests[node, 0]
                while test >= 0:
                    if test < first_set:
                        if _is_left(starts[start, test >> MISSING_BITS], numbers[node], test & 7):
                            node += 1
                        else:
                            node = tests[node, 1]
                    else:
                        at = test - first_set
                        some_left = np.uint64(0)
                        some_right = np.uint64(0)
                        for word in range(words):
                            some_left |= members[word] & sets[at, word]
                            some_right |= members[word] & ~sets[at, word]
                        if some_left and some_right:
                            waiting[height] = tests[node, 1]
                            for word in range(words):
                                waiting_sets[height, word] = members[word] & ~sets[at, word]
                                members[word] &= sets[at, word]
                            height += 1
                        if some_left:
                            node += 1
                        else:
                            node = tests[node, 1]
                    test = tests[node, 0]
                value = numbers[node]
                for word in range(words):
                    rest = members[word]
                    while rest:
                        bit = rest & (~rest + one)
                        found[start, (word << 6) + _POSITION[(bit * _DE_BRUIJN) >> _TOP_SIX]] += (
                            value
                        )
                        rest ^= bit
