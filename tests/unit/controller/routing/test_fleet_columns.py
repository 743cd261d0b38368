"""Whatever has happened to a fleet, its columns are those of a fleet that was never seen before."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.cluster import Calibration, ClusterSnapshot, Destination, TokenPrice
from controller.ids import ModelName, NodeId
from controller.routing.decision_memory import DecisionMemory
from controller.routing.fleet_columns import FleetColumns, fleet_columns
from controller.routing.problem import MalformedArray, name_key
from tests.unit.controller.routing.clusters import destination, fleet, node

_NODES = ("a", "b", "c", "d")
_MODELS = ("small", "middle", "large")


def _check(found: FleetColumns, snapshot: ClusterSnapshot) -> None:
    """Against attributes that are read one by one, without any memory."""
    of = snapshot.destinations
    assert found.destinations == of
    assert found.node_ids == tuple(n.node_id for n in snapshot.nodes)
    assert [found.node_ids[at] for at in found.node_of] == [d.node_id for d in of]
    assert found.node_key.tolist() == [name_key(n.node_id) for n in snapshot.nodes]
    names = sorted({d.model for d in of})
    assert [names[at] for at in found.model_of] == [d.model for d in of]
    assert found.model_key.tolist() == [name_key(d.model) for d in of]
    assert list(found.placements) == [
        (d.node_id, d.model, d.family, d.parameters_billions, d.quantisation) for d in of
    ]
    for name in (
        "characters_per_token", "context_tokens", "extra_prompt_tokens", "mean_quality_ratio",
        "slots", "parameters_billions", "has_chat_template", "refuses_raw_prompts",
        "supports_response_format",
    ):  # fmt: skip
        assert getattr(found, name).tolist() == [getattr(d, name) for d in of], name
    for name in (
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "saturated_decode_tokens_per_second",
        "utilisation_ratio",
    ):
        assert getattr(found, name).tolist() == [getattr(d.calibration, name) for d in of], name
    for name in ("prefill_joules_per_token", "decode_joules_per_token"):
        told = [getattr(d.calibration, name) for d in of]
        expected = [math.nan if joules is None else joules for joules in told]
        np.testing.assert_array_equal(getattr(found, name), expected)
    for name in ("prompt_usd_per_token", "completion_usd_per_token", "request_usd"):
        assert getattr(found, name).tolist() == [getattr(d.price, name) for d in of], name


def _whole_fleet() -> dict[tuple[str, str], Destination]:
    return {(on, model): destination(on, model) for on in _NODES for model in _MODELS}


_POSITIVE = st.floats(0.5, 1e4)
_CHANGES = st.one_of(
    # A request was sent there, or came back.
    st.builds(lambda free: {"free_slots": free, "next_slot_seconds": 1.5}, st.integers(0, 3)),
    st.builds(
        lambda rate, joules: {"calibration": Calibration(rate, rate, rate, 0.5, 0, None, "", "",
                                                         joules, None)},
        _POSITIVE,
        st.none() | _POSITIVE,
    ),
    st.builds(lambda usd: {"price": TokenPrice(usd, 2 * usd, usd)}, st.floats(0.0, 1.0)),
    st.builds(lambda tokens: {"extra_prompt_tokens": tokens}, st.floats(-50.0, 50.0)),
    st.builds(lambda tokens: {"context_tokens": tokens}, st.integers(1, 9999)),
    st.builds(lambda ratio: {"mean_quality_ratio": ratio}, st.floats(0.0, 1.0)),
    st.builds(lambda flag: {"has_chat_template": flag}, st.booleans()),
    st.builds(lambda flag: {"refuses_raw_prompts": flag}, st.booleans()),
    st.builds(lambda name: {"quantisation": name}, st.sampled_from(("Q4_0", "Q8_0"))),
    st.just({}),  # made again, and the same
)  # fmt: skip
_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("change", "change", "change", "remove", "restore", "node", "again")),
        st.sampled_from(_NODES),
        st.sampled_from(_MODELS),
        _CHANGES,
    ),
    min_size=1,
    max_size=12,
)


@given(_EVENTS)
def test_columns_are_those_of_the_fleet_as_it_is_now(
    events: list[tuple[str, str, str, dict[str, object]]],
) -> None:
    there, away, memory = _whole_fleet(), set[str](), DecisionMemory()
    for version, (what, on, model, changes) in enumerate(events):
        if what == "change" and (on, model) in there:
            there[on, model] = replace(there[on, model], **changes)
        elif what == "remove" and len(there) > 1:
            there.pop((on, model), None)
        elif what == "restore":
            there.setdefault((on, model), destination(on, model, **changes))
        elif what == "node":
            away ^= {on}
        nodes = [node(name) for name in _NODES if name not in away]
        destinations = [there[key] for key in sorted(there) if key[0] not in away]
        snapshot = replace(fleet(nodes, destinations), fleet_version=version)
        _check(memory.columns(snapshot), snapshot)
        _check(fleet_columns(snapshot), snapshot)


def test_a_node_without_a_model_shifts_the_indices_of_those_behind_it() -> None:
    destinations = [destination("b"), destination("c")]
    before = fleet_columns(fleet([node("b"), node("c")], destinations))
    assert before.node_of.tolist() == [0, 1]
    joined = fleet([node("a"), node("b"), node("c")], destinations)
    assert fleet_columns(joined, before).node_of.tolist() == [1, 2]
    _check(fleet_columns(joined, before), joined)


def test_what_no_column_tells_of_leaves_the_arrays_alone() -> None:
    """Claims and backlogs change with every request; the arrays of a fleet do not."""
    destinations = [destination("a"), destination("a", "other"), destination("b"),
                    destination("b", "other")]  # fmt: skip
    before = fleet_columns(fleet([node("a"), node("b")], destinations))
    claimed = [replace(destinations[0], free_slots=1, next_slot_seconds=2.0), *destinations[1:]]
    after = fleet_columns(fleet([node("a", backlog_seconds=9.0), node("b")], claimed), before)
    assert after.destinations[0].free_slots == 1
    for name in (
        "placements",
        "prefill_tokens_per_second",
        "context_tokens",
        "node_of",
        "has_chat_template",
    ):
        assert getattr(after, name) is getattr(before, name)


def test_nobody_can_change_the_columns_of_the_next_decision() -> None:
    snapshot = fleet([node("a")], [destination("a"), destination("a", "other")])
    for name in ("prefill_tokens_per_second", "slots", "node_of", "node_key", "model_of",
                 "model_key", "has_chat_template"):  # fmt: skip
        with pytest.raises(ValueError, match="read-only"):
            getattr(fleet_columns(snapshot), name)[0] = 1


def test_a_destination_without_its_node_is_named() -> None:
    stray = replace(destination("a"), node_id=NodeId("ghost"), model=ModelName("small"))
    with pytest.raises(MalformedArray, match="ghost"):
        fleet_columns(fleet([node("a")], [stray]))
