"""What decisions read of a fleet's destinations, as arrays.

A snapshot has a thousand destinations, and to collect their attributes one by one takes longer than
a policy thinks. So columns can be made from earlier ones: a destination that is the same object
there has the same values, since nobody can change it, and only the rows of others are read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from controller.domain.cluster import ClusterSnapshot, Destination
from controller.ids import ModelName, NodeId
from controller.routing.problem import BoolArray, FloatArray, IntArray, MalformedArray, name_key

Placement: TypeAlias = tuple[NodeId, ModelName, str, float, str]
"""A destination's node, model, model family, billions of parameters and quantisation."""

_MOST_CHANGED_RATIO: Final = 0.25
"""Of the rows; when more have changed, all are read anew."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetColumns:
    """The destinations of a fleet, D of them, on N nodes; the arrays are read-only.

    Attributes:
        node_ids: N.
        destinations: D; what the arrays were read from, with the claims of that moment.
        placements: D; the same object for as long as none of them is another.
        node_of: int64[D].
        node_key: int64[N]; `name_key` of each node.
        model_of: int64[D]; equal models share an index, in the order of their names.
        model_key: int64[D]; `name_key` of each model.
        characters_per_token, context_tokens, extra_prompt_tokens, mean_quality_ratio, slots,
        parameters_billions, prefill_tokens_per_second, decode_tokens_per_second,
        saturated_decode_tokens_per_second, utilisation_ratio, load_watts,
        prefill_joules_per_token, decode_joules_per_token, prompt_usd_per_token,
        completion_usd_per_token, request_usd: float64[D]; NaN is unknown.
        has_chat_template, refuses_raw_prompts, supports_response_format: bool[D].
    """

    node_ids: tuple[NodeId, ...]
    destinations: tuple[Destination, ...]
    placements: tuple[Placement, ...]
    node_of: IntArray
    node_key: IntArray
    model_of: IntArray
    model_key: IntArray
    characters_per_token: FloatArray
    context_tokens: FloatArray
    extra_prompt_tokens: FloatArray
    mean_quality_ratio: FloatArray
    slots: FloatArray
    parameters_billions: FloatArray
    prefill_tokens_per_second: FloatArray
    decode_tokens_per_second: FloatArray
    saturated_decode_tokens_per_second: FloatArray
    utilisation_ratio: FloatArray
    load_watts: FloatArray
    prefill_joules_per_token: FloatArray
    decode_joules_per_token: FloatArray
    prompt_usd_per_token: FloatArray
    completion_usd_per_token: FloatArray
    request_usd: FloatArray
    has_chat_template: BoolArray
    refuses_raw_prompts: BoolArray
    supports_response_format: BoolArray


def fleet_columns(snapshot: ClusterSnapshot, last: FleetColumns | None = None) -> FleetColumns:
    """The columns of a snapshot.

    Args:
        snapshot: the fleet.
        last: columns of an earlier snapshot; what has not changed since is taken from them.

    Raises:
        MalformedArray: a destination names a node that is not in the snapshot.
    """
    node_ids = tuple([node.node_id for node in snapshot.nodes])
    found = None
    if last is not None and last.node_ids == node_ids:
        found = _changed(last, snapshot.destinations)
    return found or _collected(node_ids, snapshot.destinations)


def _collected(node_ids: tuple[NodeId, ...], destinations: tuple[Destination, ...]) -> FleetColumns:
    index = {node_id: at for at, node_id in enumerate(node_ids)}
    try:
        node_of = np.array([index[d.node_id] for d in destinations], dtype=np.int64)
    except KeyError as error:
        raise MalformedArray(
            f"a destination names node {error.args[0]}, which is not there"
        ) from None
    names = [d.model for d in destinations]
    models = {model: at for at, model in enumerate(sorted(set(names)))}
    model_of = np.array([models[model] for model in names], dtype=np.int64)
    keys = np.array([name_key(model) for model in models], dtype=np.int64)
    rows = [_row(d) for d in destinations]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(_NUMBERS) + len(_FLAGS))
    node_key = np.array([name_key(node_id) for node_id in node_ids], dtype=np.int64)
    return FleetColumns(
        node_ids=node_ids,
        destinations=destinations,
        placements=tuple(map(_placement, destinations)),
        node_of=_frozen(node_of),
        node_key=_frozen(node_key),
        model_of=_frozen(model_of),
        model_key=_frozen(keys[model_of]),
        **_named(table.T),
    )


def _changed(last: FleetColumns, destinations: tuple[Destination, ...]) -> FleetColumns | None:
    """The last columns with the rows that are others now; None when too much has changed."""
    if len(destinations) != len(last.destinations):
        return None
    pairs = zip(last.destinations, destinations, strict=True)
    changed = [at for at, (old, new) in enumerate(pairs) if old is not new]
    if len(changed) > _MOST_CHANGED_RATIO * len(destinations):
        return None
    rows: list[tuple[int, tuple[float, ...]]] = []
    for at in changed:
        old, new = last.destinations[at], destinations[at]
        if last.placements[at] != _placement(new):
            return None
        row = _row(new)
        if row != _row(old):
            rows.append((at, row))
    if not rows:  # requests came and went, which no column tells of
        return replace(last, destinations=destinations)
    table = np.stack([getattr(last, name) for name in (*_NUMBERS, *_FLAGS)]).astype(np.float64)
    for at, row in rows:
        table[:, at] = row
    return replace(last, destinations=destinations, **_named(table))


_NUMBERS: Final = (
    "characters_per_token",
    "context_tokens",
    "extra_prompt_tokens",
    "mean_quality_ratio",
    "slots",
    "parameters_billions",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "saturated_decode_tokens_per_second",
    "utilisation_ratio",
    "load_watts",
    "prefill_joules_per_token",
    "decode_joules_per_token",
    "prompt_usd_per_token",
    "completion_usd_per_token",
    "request_usd",
)
_FLAGS: Final = ("has_chat_template", "refuses_raw_prompts", "supports_response_format")


def _row(destination: Destination) -> tuple[float, ...]:
    """A destination's `_NUMBERS`, then its `_FLAGS`."""
    speeds, price = destination.calibration, destination.price
    prefill, decode = speeds.prefill_joules_per_token, speeds.decode_joules_per_token
    return (
        destination.characters_per_token,
        destination.context_tokens,
        destination.extra_prompt_tokens,
        destination.mean_quality_ratio,
        destination.slots,
        destination.parameters_billions,
        speeds.prefill_tokens_per_second,
        speeds.decode_tokens_per_second,
        speeds.saturated_decode_tokens_per_second,
        speeds.utilisation_ratio,
        math.nan if speeds.load_watts is None else speeds.load_watts,
        math.nan if prefill is None else prefill,
        math.nan if decode is None else decode,
        price.prompt_usd_per_token,
        price.completion_usd_per_token,
        price.request_usd,
        destination.has_chat_template,
        destination.refuses_raw_prompts,
        destination.supports_response_format,
    )


def _placement(destination: Destination) -> Placement:
    return (
        destination.node_id,
        destination.model,
        destination.family,
        destination.parameters_billions,
        destination.quantisation,
    )


def _named(table: FloatArray) -> Mapping[str, Any]:
    """The rows of float64[numbers and flags, D] by the names of their fields."""
    numbers = _frozen(np.array(table[: len(_NUMBERS)], order="C"))
    flags = _frozen(table[len(_NUMBERS) :] != 0.0)
    return dict(zip((*_NUMBERS, *_FLAGS), (*numbers, *flags), strict=True))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
