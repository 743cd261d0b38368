"""Decision trees evaluated from plain arrays, compiled; neither scikit-learn nor LightGBM."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.routing.compiled import compiled_part, compiled_without_gil

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

LEAF: Final = -1


@dataclass(frozen=True, slots=True)
class TreeEnsemble:
    """Trees whose nodes lie one after the other in arrays.

    A row goes left where its value is at most the threshold. Its answer is the sum over trees of
    the leaf's values.

    Attributes:
        roots: int32[T], each tree's first node; a tree's nodes follow it.
        feature: int32[nodes]; the column a node looks at, or `LEAF`.
        threshold: float64[nodes].
        left: int32[nodes]; where values up to the threshold go.
        right: int32[nodes].
        missing: int32[nodes]; 0 treats NaN as 0, 1 counts zero and NaN as missing, 2 NaN; plus 4
            when what is missing goes left.
        values: float64[nodes, outputs]; used at leaves.
        n_features: columns of a row.
    """

    roots: IntArray
    feature: IntArray
    threshold: FloatArray
    left: IntArray
    right: IntArray
    missing: IntArray
    values: FloatArray
    n_features: int

    def __post_init__(self) -> None:
        nodes = self.feature.shape[0]
        same = (self.threshold, self.left, self.right, self.missing, self.values)
        if nodes == 0 or self.values.ndim != 2 or any(part.shape[0] != nodes for part in same):
            raise ValueError("a tree ensemble needs arrays of one length, with at least one node")
        inner = self.feature != LEAF
        positions = np.flatnonzero(inner)
        starts = self.roots
        if starts.size == 0 or starts.min() < 0 or starts.max() >= nodes:
            raise ValueError("a tree starts outside the arrays")
        if (self.feature[inner] < 0).any() or (self.feature[inner] >= self.n_features).any():
            raise ValueError("a tree looks at a feature that does not exist")
        for side in (self.left, self.right):
            # Children behind their parent: so every walk ends, whatever the file says.
            if (side[inner] <= positions).any() or (side[inner] >= nodes).any():
                raise ValueError("a tree's child does not come after its parent")

    @property
    def n_outputs(self) -> int:
        """Numbers that one row brings."""
        return int(self.values.shape[1])

    def sums(self, rows: FloatArray) -> FloatArray:
        """float64[n, outputs]: for each row the sum of its leaves.

        Args:
            rows: float64[n, n_features]; NaN is missing.

        Raises:
            ValueError: the rows have another number of columns.
        """
        rows = np.ascontiguousarray(rows, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != self.n_features:
            raise ValueError(
                f"rows of {rows.shape[-1]} features, but the trees were fitted on {self.n_features}"
            )
        found = np.zeros((rows.shape[0], self.n_outputs))
        _add_leaves(
            rows,
            self.roots,
            self.feature,
            self.threshold,
            self.left,
            self.right,
            self.missing,
            self.values,
            found,
        )
        return found

    def prepare(self, ends: FloatArray) -> "PreparedEnds":
        """What is known of the trees when the last columns can only be one of a few.

        Many rows differ only in their first columns, a query's, while the last ones, of models on
        devices, recur. Then each node over the last columns parts them once and for all.

        Args:
            ends: float64[K, last columns].

        Raises:
            ValueError: they are more columns than a row has.
        """
        ends = np.ascontiguousarray(ends, dtype=np.float64)
        first = self.n_features - ends.shape[1]
        if ends.ndim != 2 or first < 0:
            raise ValueError(f"ends of {ends.shape[-1]} columns do not fit {self.n_features}")
        words = max(1, -(-ends.shape[0] // 64))
        goes_left = np.zeros((self.feature.shape[0], words), dtype=np.uint64)
        _part_ends(ends, first, self.feature, self.threshold, self.missing, goes_left)
        sizes = np.diff(np.append(self.roots, self.feature.shape[0]))
        return PreparedEnds(ends.shape[0], first, goes_left, int(sizes.max()))

    def sums_of_prepared(self, starts: FloatArray, prepared: "PreparedEnds") -> FloatArray:
        """float64[Q, K]: `sums` of each start joined with each end, of the one output.

        A tree is walked once a start with the set of ends that get to a node, so that it takes
        about as long as there are leaves to be reached, not as there are rows. The sums are those
        of `sums` to the last bit.

        Args:
            starts: float64[Q, first columns].
            prepared: of `prepare`, of this ensemble.

        Raises:
            ValueError: the ensemble has several outputs, or the parts do not fit.
        """
        starts = np.ascontiguousarray(starts, dtype=np.float64)
        if self.n_outputs != 1:
            raise ValueError("prepared ends serve ensembles of one output")
        if starts.ndim != 2 or starts.shape[1] != prepared.first:
            raise ValueError(f"starts of {starts.shape[-1]} columns, not {prepared.first}")
        if prepared.goes_left.shape[0] != self.feature.shape[0]:
            raise ValueError("these ends were prepared for other trees")
        found = np.zeros((starts.shape[0], prepared.count))
        _add_leaves_of_sets(
            starts,
            self.roots,
            self.feature,
            self.threshold,
            self.left,
            self.right,
            self.missing,
            self.values,
            prepared.goes_left,
            prepared.deepest,
            found,
        )
        return found

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """For an artifact; `ensemble_from_arrays` reads it back."""
        return {
            "roots": self.roots,
            "feature": self.feature,
            "threshold": self.threshold,
            "left": self.left,
            "right": self.right,
            "missing": self.missing,
            "values": self.values,
            "n_features": np.array(self.n_features, dtype=np.int64),
        }


@dataclass(frozen=True, slots=True, eq=False)
class PreparedEnds:
    """How the nodes of an ensemble part a set of last columns; see `TreeEnsemble.prepare`.

    Attributes:
        count: K.
        first: columns that are not prepared.
        goes_left: uint64[nodes, ceil(K / 64)]; the bit of an end is set where it goes left.
        deepest: nodes of the largest tree: more sets than can wait during a walk.
    """

    count: int
    first: int
    goes_left: NDArray[np.uint64]
    deepest: int


def ensemble_from_arrays(arrays: Mapping[str, NDArray[Any]]) -> TreeEnsemble:
    """The trees of `TreeEnsemble.as_arrays`.

    Raises:
        ValueError: an array is missing, or they do not make trees.
    """
    try:
        return TreeEnsemble(
            roots=np.ascontiguousarray(arrays["roots"], dtype=np.int32),
            feature=np.ascontiguousarray(arrays["feature"], dtype=np.int32),
            threshold=np.ascontiguousarray(arrays["threshold"], dtype=np.float64),
            left=np.ascontiguousarray(arrays["left"], dtype=np.int32),
            right=np.ascontiguousarray(arrays["right"], dtype=np.int32),
            missing=np.ascontiguousarray(arrays["missing"], dtype=np.int32),
            values=np.ascontiguousarray(arrays["values"], dtype=np.float64),
            n_features=int(arrays["n_features"]),
        )
    except KeyError as error:
        raise ValueError(f"the trees lack the array {error}") from error


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
def _add_leaves(
    rows: FloatArray,
    roots: IntArray,
    feature: IntArray,
    threshold: FloatArray,
    left: IntArray,
    right: IntArray,
    missing: IntArray,
    values: FloatArray,
    found: FloatArray,
) -> None:
    # Tree by tree, so that a tree's nodes stay in the nearest cache while all rows pass it.
    for tree in range(roots.shape[0]):
        root = roots[tree]
        for row in range(rows.shape[0]):
            node = root
            while feature[node] >= 0:
                if _is_left(rows[row, feature[node]], threshold[node], missing[node]):
                    node = left[node]
                else:
                    node = right[node]
            for output in range(values.shape[1]):
                found[row, output] += values[node, output]


@compiled_without_gil
def _part_ends(
    ends: FloatArray,
    first: int,
    feature: IntArray,
    threshold: FloatArray,
    missing: IntArray,
    goes_left: NDArray[np.uint64],
) -> None:
    for node in range(feature.shape[0]):
        column = feature[node] - first
        if column < 0:
            continue
        for end in range(ends.shape[0]):
            if _is_left(ends[end, column], threshold[node], missing[node]):
                goes_left[node, end >> 6] |= np.uint64(1) << np.uint64(end & 63)


@compiled_without_gil
def _add_leaves_of_sets(
    starts: FloatArray,
    roots: IntArray,
    feature: IntArray,
    threshold: FloatArray,
    left: IntArray,
    right: IntArray,
    missing: IntArray,
    values: FloatArray,
    goes_left: NDArray[np.uint64],
    deepest: int,
    found: FloatArray,
) -> None:
    words = goes_left.shape[1]
    count = found.shape[1]
    first = starts.shape[1]
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
                while feature[node] >= 0:
                    column = feature[node]
                    if column < first:
                        if _is_left(starts[start, column], threshold[node], missing[node]):
                            node = left[node]
                        else:
                            node = right[node]
                        continue
                    some_left = np.uint64(0)
                    some_right = np.uint64(0)
                    for word in range(words):
                        some_left |= members[word] & goes_left[node, word]
                        some_right |= members[word] & ~goes_left[node, word]
                    if some_left and some_right:
                        waiting[height] = right[node]
                        for word in range(words):
                            waiting_sets[height, word] = members[word] & ~goes_left[node, word]
                            members[word] &= goes_left[node, word]
                        height += 1
                    node = left[node] if some_left else right[node]
                value = values[node, 0]
                for word in range(words):
                    rest = members[word]
                    end = word << 6
                    while rest:
                        if rest & one:
                            found[start, end] += value
                        rest >>= one
                        end += 1


# -- LightGBM's text ------------------------------------------------------------------------------


def ensemble_from_lightgbm(text: str) -> tuple[TreeEnsemble, tuple[str, ...]]:
    """The trees of a LightGBM text model for regression, and the names of its features.

    Raises:
        ValueError: it is no such model, or uses what is not evaluated here: categorical splits,
            linear leaves, several outputs.
    """
    head, *blocks = re.split(r"^Tree=\d+\n", text.split("end of trees")[0], flags=re.MULTILINE)
    general = _fields(head)
    if not text.startswith("tree") or not blocks or "feature_names" not in general:
        raise ValueError("this is no text model of LightGBM")
    if general.get("num_tree_per_iteration", "1") != "1":
        raise ValueError("the model has several outputs; fit a regression")
    names = tuple(general["feature_names"].split())
    parts: list[_Nodes] = []
    start = 0
    roots = []
    for block in blocks:
        nodes = _lightgbm_tree(_fields(block), start)
        roots.append(start)
        start += nodes.feature.shape[0]
        parts.append(nodes)
    return (
        TreeEnsemble(
            roots=np.array(roots, dtype=np.int32),
            feature=np.concatenate([part.feature for part in parts]),
            threshold=np.concatenate([part.threshold for part in parts]),
            left=np.concatenate([part.left for part in parts]),
            right=np.concatenate([part.right for part in parts]),
            missing=np.concatenate([part.missing for part in parts]),
            values=np.concatenate([part.values for part in parts])[:, None],
            n_features=len(names),
        ),
        names,
    )


@dataclass(frozen=True, slots=True)
class _Nodes:
    feature: IntArray
    threshold: FloatArray
    left: IntArray
    right: IntArray
    missing: IntArray
    values: FloatArray


def _fields(block: str) -> dict[str, str]:
    lines = (line.partition("=") for line in block.splitlines() if "=" in line)
    return {key: value for key, _, value in lines}


def _numbers(fields: Mapping[str, str], name: str) -> list[float]:
    try:
        return [float(number) for number in fields[name].split()]
    except (KeyError, ValueError) as error:
        raise ValueError(f"a tree's {name} cannot be read; save the model anew") from error


def _lightgbm_tree(fields: Mapping[str, str], start: int) -> _Nodes:
    """Inner nodes first, in preorder of depth as LightGBM numbers them, leaves behind them."""
    if fields.get("num_cat", "0") != "0" or fields.get("is_linear", "0") != "0":
        raise ValueError("categorical splits and linear leaves are not evaluated here")
    leaves = np.array(_numbers(fields, "leaf_value"))
    inner = leaves.shape[0] - 1
    total = inner + leaves.shape[0]
    values = np.zeros(total)
    values[inner:] = leaves
    feature = np.full(total, LEAF, dtype=np.int32)
    threshold = np.zeros(total)
    left = np.zeros(total, dtype=np.int32)
    right = np.zeros(total, dtype=np.int32)
    missing = np.zeros(total, dtype=np.int32)
    if inner:
        feature[:inner] = _sized(_numbers(fields, "split_feature"), inner)
        threshold[:inner] = _sized(_numbers(fields, "threshold"), inner)
        left[:inner] = _children(_numbers(fields, "left_child"), inner, start)
        right[:inner] = _children(_numbers(fields, "right_child"), inner, start)
        kinds = _sized(_numbers(fields, "decision_type"), inner).astype(np.int32)
        if (kinds & 1).any():
            raise ValueError("categorical splits are not evaluated here")
        missing[:inner] = ((kinds >> 2) & 3) | np.where(kinds & 2, 4, 0)
    return _Nodes(feature, threshold, left, right, missing, values)


def _sized(numbers: Sequence[float], length: int) -> FloatArray:
    if len(numbers) != length:
        raise ValueError("a tree's lists have different lengths; save the model anew")
    return np.array(numbers)


def _children(numbers: Sequence[float], inner: int, start: int) -> IntArray:
    """A negative child -i-1 is leaf i."""
    given = _sized(numbers, inner).astype(np.int64)
    return (start + np.where(given >= 0, given, inner - given - 1)).astype(np.int32)
