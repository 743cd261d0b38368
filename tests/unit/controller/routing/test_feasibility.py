import numpy as np
import pytest

from controller.domain.cluster import NodeKind, NodeState, TokenPrice
from controller.domain.refusal import Refusal, RefusalReason
from controller.domain.request import (
    ChatMessage,
    Constraints,
    FormatKind,
    InferenceRequest,
    ResponseFormat,
)
from controller.ids import ModelName, NodeId
from controller.request_manager.refusals import refusal_sentence
from controller.routing.formulation import FormulatedBatch, formulate
from tests.unit.controller.routing.clusters import destination, fleet, node, request

SNAPSHOT = fleet(
    [
        node("cloud", kind=NodeKind.CLOUD),
        node("edge", backlog_seconds=3.0),
        node("off", state=NodeState.OFFLINE),
        node("paused", refusal="too hot: 91 degrees"),
    ],
    [
        destination("cloud", "big", price=TokenPrice(1e-3, 1e-3), mean_quality_ratio=0.9),
        destination("edge", "small", has_chat_template=False, context_tokens=300),
        destination("off", "small"),
        destination("paused", "small"),
    ],
)


def routed(asked: InferenceRequest) -> FormulatedBatch:
    return formulate([asked], SNAPSHOT, output_tokens=np.full((1, 4), 60.0))


def refusals(batch: FormulatedBatch) -> dict[str, tuple[Refusal, ...]]:
    """Everything that refuses the first request, by node."""
    found = {
        one.node_id: batch.refusals.refusals_of(0, d)
        for d, one in enumerate(batch.snapshot.destinations)
    }
    return {node_id: reasons for node_id, reasons in found.items() if reasons}


def test_only_ready_nodes_that_refuse_nothing_are_routed_to() -> None:
    """L13: a pick never returns a node outside the routable states."""
    batch = routed(request())
    assert batch.problem.feasible.tolist() == [[True, True, False, False]]
    refused = refusals(batch)
    assert refused.keys() == {"off", "paused"}
    (off,), (paused,) = refused["off"], refused["paused"]
    assert off.reason is RefusalReason.NODE_UNAVAILABLE
    assert refusal_sentence(off) == "the node is offline"
    assert refusal_sentence(paused) == "too hot: 91 degrees"


@pytest.mark.parametrize(
    ("asked", "refusing", "reason", "detail"),
    [
        (request(model=ModelName("big")), 1, RefusalReason.OTHER_MODEL, "serves small, not big"),
        (request(model=ModelName("small")), 0, RefusalReason.OTHER_MODEL, "serves big, not small"),
        (
            request(prompt="x" * 1000),
            1,
            RefusalReason.CONTEXT_TOO_SMALL,
            "about 250 prompt and 60 answer tokens exceed the context of 300",
        ),
        (
            request(prompt=(ChatMessage("user", "hello"),)),
            1,
            RefusalReason.NO_CHAT_TEMPLATE,
            "the model has no chat template; send a raw prompt",
        ),
        (
            request(constraints=Constraints(min_quality_ratio=0.75)),
            1,
            RefusalReason.QUALITY_TOO_LOW,
            "predicted quality 0.500 is below 0.75",
        ),
        (
            request(constraints=Constraints(deadline_seconds=9.0)),
            1,
            RefusalReason.DEADLINE_TOO_SOON,
            "would finish after 10 s, later than 9 s",
        ),
        (
            request(constraints=Constraints(max_price_usd=0.1)),
            0,
            RefusalReason.PRICE_TOO_HIGH,
            "costs about 0.16 USD, above 0.1",
        ),
        (
            request(constraints=Constraints(edge_only=True)),
            0,
            RefusalReason.NOT_ON_EDGE,
            "the node is in the cloud; the request must stay on the edge",
        ),
        (
            request(constraints=Constraints(node_id=NodeId("edge"))),
            0,
            RefusalReason.OTHER_NODE,
            "is not on edge, the only node that was allowed",
        ),
    ],
)
def test_constraint_takes_the_pair_away_and_says_why(
    asked: InferenceRequest, refusing: int, reason: RefusalReason, detail: str
) -> None:
    batch = routed(asked)
    kept = 1 - refusing
    assert batch.problem.feasible[0, kept]
    assert not batch.problem.feasible[0, refusing]
    (refusal,) = batch.refusals.refusals_of(0, refusing)
    assert (refusal.reason, refusal_sentence(refusal)) == (reason, detail)
    assert batch.refusals.refusals_of(0, kept) == ()


def test_limit_that_is_met_exactly_refuses_nothing() -> None:
    exact = routed(request())
    limits = Constraints(
        min_quality_ratio=0.5,
        deadline_seconds=float(3.0 + exact.problem.latency_seconds[0, 1]
                               + exact.problem.network_seconds[0, 1]),
        max_price_usd=0.0,
        edge_only=True,
    )  # fmt: skip
    assert routed(request(constraints=limits)).problem.feasible[0].tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_pair_refused_for_several_reasons_names_each() -> None:
    asked = request(model=ModelName("other"), constraints=Constraints(edge_only=True))
    reasons = [refusal.reason for refusal in routed(asked).refusals.refusals_of(0, 0)]
    assert reasons == [RefusalReason.OTHER_MODEL, RefusalReason.NOT_ON_EDGE]


def test_request_that_nothing_can_take_has_a_reason_from_every_destination() -> None:
    batch = routed(request(model=ModelName("other")))
    assert not batch.problem.routable[0]
    assert refusals(batch).keys() == {"cloud", "edge", "off", "paused"}


def test_raw_prompt_is_not_sent_where_only_chats_are_taken() -> None:
    snapshot = fleet([node("a")], [destination("a", "chatty", refuses_raw_prompts=True)])
    (refused,) = formulate([request()], snapshot).refusals.refusals_of(0, 0)
    assert refused.reason is RefusalReason.NO_RAW_PROMPTS
    chat = request(prompt=(ChatMessage("user", "hello"),))
    assert formulate([chat], snapshot).problem.feasible.all()


def test_response_format_is_sent_only_where_it_is_kept() -> None:
    snapshot = fleet(
        [node("a")],
        [destination("a", "free", supports_response_format=False), destination("a", "strict")],
    )
    asked = request(response_format=ResponseFormat(FormatKind.JSON_OBJECT))
    batch = formulate([asked], snapshot)
    assert batch.problem.feasible.tolist() == [[False, True]]
    (refused,) = batch.refusals.refusals_of(0, 0)
    assert refused.reason is RefusalReason.NO_RESPONSE_FORMAT
    assert formulate([request()], snapshot).problem.feasible.all()


def test_destinations_that_nearly_take_a_request_come_first() -> None:
    snapshot = fleet(
        [node("away", state=NodeState.OFFLINE), node("pi"), node("vm")],
        [
            destination("pi", "other"),
            destination("away", "asked"),
            destination("pi", "asked", context_tokens=100),
            destination("vm", "asked", context_tokens=200),
            destination("vm", "asked"),
        ],
    )
    asked = request(
        prompt="x" * 2000, model=ModelName("asked"), constraints=Constraints(min_quality_ratio=1.0)
    )
    batch = formulate([asked], snapshot)
    assert not batch.problem.routable.any()
    assert batch.refusals.nearest_first(0).tolist() == [4, 3, 2, 1, 0]
