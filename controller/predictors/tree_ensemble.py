"""Decision trees from plain arrays: neither scikit-learn nor LightGBM is needed to ask them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.predictors.tree_walk import (
    PackedTrees,
    PreparedEnds,
    pack_trees,
    prepare_ends,
    sums_of_rows,
    sums_of_sets,
)

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
        packed: the same trees as they are walked.
    """

    roots: IntArray
    feature: IntArray
    threshold: FloatArray
    left: IntArray
    right: IntArray
    missing: IntArray
    values: FloatArray
    n_features: int
    packed: PackedTrees = field(init=False, repr=False)

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
        children = np.concatenate([self.left[inner], self.right[inner], starts])
        if np.bincount(children, minlength=nodes).max() > 1:
            raise ValueError("a tree's node has two parents")
        if (self.missing[inner] & ~7).any():
            raise ValueError("a tree treats what is missing in an unknown way")
        packed = pack_trees(
            self.roots,
            self.feature,
            self.threshold,
            self.left,
            self.right,
            self.missing,
            self.values,
        )
        object.__setattr__(self, "packed", packed)

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
        return sums_of_rows(self.packed, rows)

    def prepare(self, ends: FloatArray) -> PreparedEnds:
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
        return prepare_ends(self.packed, first, ends)

    def sums_of_prepared(self, starts: FloatArray, prepared: PreparedEnds) -> FloatArray:
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
        if prepared.packed is not self.packed:
            raise ValueError("these ends were prepared for other trees")
        return sums_of_sets(prepared, starts)

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
        raise ValueError(f"a tree's {name} cannot be read; save the model again") from error


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
        raise ValueError("a tree's lists have different lengths; save the model again")
    return np.array(numbers)


def _children(numbers: Sequence[float], inner: int, start: int) -> IntArray:
    """A negative child -i-1 is leaf i."""
    given = _sized(numbers, inner).astype(np.int64)
    return (start + np.where(given >= 0, given, inner - given - 1)).astype(np.int32)
