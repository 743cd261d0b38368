"""Whether a decision is like those that a policy was trained on."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.routing.ppo.observation import (
    Float32Array,
    Layout,
    queue_inputs,
    waited_seconds,
)
from controller.routing.problem import BoolArray, IntArray, RoutingProblem

RANGE_MARGIN: Final = 0.25
"""An input may leave the range of the training by this share of the range's width, and by
`ABSOLUTE_MARGIN`."""

ABSOLUTE_MARGIN: Final = 0.25


class OutOfRange(Exception):
    """The policy was not trained on anything like this; the text says what is different."""


def check_range(inputs: Float32Array, lowest: Float32Array, highest: Float32Array) -> None:
    """Pass if no input is far outside what the training saw.

    Args:
        inputs: float32[..., inputs].

    Raises:
        OutOfRange: with the first input that is.
    """
    flat = inputs.reshape(-1, inputs.shape[-1])
    low, high = flat.min(axis=0), flat.max(axis=0)
    outside = _is_outside(low, lowest, highest) | _is_outside(high, lowest, highest)
    if outside.any():
        raise _out_of_range(int(np.argmax(outside)), low, high, lowest, highest)


def vector_in_range(
    layout: Layout, vector: Float32Array, lowest: Float32Array, highest: Float32Array
) -> Float32Array:
    """What the encoder of a policy of one fleet may see of a decision; float32[inputs].

    A node that the policy never used was idle all through its training, and what the encoder would
    make of a queue there is chance. Such a queue is shown to it as the nearest that it knows; it
    counts all the same in the rewards and for the pointer, which treat all nodes alike. So it is
    judged by the longest queue of any node.

    Args:
        layout: of the policy.
        vector: float32[inputs], of `layout_observation`.
        lowest, highest: float32[inputs]; of the training.

    Raises:
        OutOfRange: a queue is far longer than any in the training, or another input is outside.
    """
    outside = _is_outside(vector, lowest, highest)
    if not outside.any():
        return vector
    waits, idles = queue_inputs(layout)
    others = outside.copy()
    others[waits] = others[idles] = False
    if others.any():
        raise _out_of_range(int(np.argmax(others)), vector, vector, lowest, highest)
    longest = highest[waits].max()
    if _is_outside(vector[waits], lowest[waits], longest).any():
        ahead, trained = (waited_seconds(float(part)) for part in (vector[waits].max(), longest))
        raise OutOfRange(
            f"a node has {ahead:.3g} s of work ahead, trained were up to {trained:.3g}"
        )
    return np.where(outside, np.clip(vector, lowest, highest), vector)


def _is_outside(
    inputs: Float32Array, lowest: Float32Array, highest: Float32Array | np.float32
) -> BoolArray:
    slack = RANGE_MARGIN * (highest - lowest) + ABSOLUTE_MARGIN
    return np.asarray((inputs < lowest - slack) | (inputs > highest + slack))


def _out_of_range(
    index: int, low: Float32Array, high: Float32Array, lowest: Float32Array, highest: Float32Array
) -> OutOfRange:
    return OutOfRange(
        f"input {index} lies in {low[index]:.3g}..{high[index]:.3g}, trained were "
        f"{lowest[index]:.3g}..{highest[index]:.3g}"
    )


@dataclass(frozen=True, slots=True, eq=False)
class FleetMatch:
    """Where a problem's columns are in the fleet that a policy was trained on; -1 is nowhere.

    Attributes:
        model_of: int64[D]; the layout's model.
        column_node: int64[D]; the layout's node of each column.
        node_at: int64[N]; the layout's node of each of the problem's.
    """

    model_of: IntArray
    column_node: IntArray
    node_at: IntArray

    @property
    def stranger(self) -> BoolArray:
        """bool[D]; model or node was not trained on."""
        return (self.model_of < 0) | (self.column_node < 0)


def match_layout(layout: Layout, problem: RoutingProblem) -> FleetMatch:
    """Match the columns by the keys of the names.

    A problem without keys must have exactly the trained columns: node after node, the models of
    each in the layout's order.

    Raises:
        OutOfRange: it has not.
    """
    keys, nodes = problem.metadata.model_key, problem.metadata.node_key
    if keys is None or nodes is None:
        node_of, model_of = np.nonzero(layout.deployed.T)
        if problem.n_nodes != layout.node_keys.size or not np.array_equal(node_of, problem.node_of):
            raise OutOfRange("the problem names neither nodes nor models, and is no trained fleet")
        return FleetMatch(model_of, node_of, np.arange(layout.node_keys.size))
    node_at = _positions(layout.node_keys, nodes)
    return FleetMatch(_positions(layout.model_keys, keys), node_at[problem.node_of], node_at)


def check_strangers(match: FleetMatch, problem: RoutingProblem) -> None:
    """Pass if no destination that can take a request is a stranger.

    Raises:
        OutOfRange: one is.
    """
    stranger = match.stranger
    if not stranger.any():
        return
    stranger &= problem.feasible.any(axis=0)
    if stranger.any():
        what = "model" if match.model_of[int(np.argmax(stranger))] < 0 else "node"
        raise OutOfRange(f"a {what} that the policy was not trained on can take requests")


def _positions(known: IntArray, keys: IntArray) -> IntArray:
    """Index of each key among the known ones, -1 where it is not."""
    order = np.argsort(known)
    at = np.minimum(np.searchsorted(known[order], keys), known.size - 1)
    found = order[at]
    return np.where(known[found] == keys, found, -1)
