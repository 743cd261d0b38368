"""Small fleets for the tests of formulation and feasibility."""

from typing import Any

from controller.domain.cluster import (
    Calibration,
    ClusterSnapshot,
    Destination,
    NetworkPath,
    Node,
    NodeKind,
    NodeState,
    PowerProfile,
    TokenPrice,
)
from controller.domain.request import InferenceRequest
from controller.ids import ModelName, NodeId, RequestId


def node(name: str, **changes: Any) -> Node:
    """A ready board on the edge: 4 to 10 W, receives 1 and transmits 8 Mbit/s, 10 ms away."""
    settings: dict[str, Any] = {
        "kind": NodeKind.EDGE,
        "state": NodeState.READY,
        "power": PowerProfile(4.0, 10.0, transmit_watts=1.0, receive_watts=0.5),
        "network": NetworkPath(0.01, 1e6, 8e6),
        "backlog_seconds": 0.0,
        "inflight_requests": 0,
        **changes,
    }
    return Node(NodeId(name), **settings)


def destination(on: str, model: str = "small", **changes: Any) -> Destination:
    """100 tokens/s of prompt, 10 of answer alone and 40 saturated; free; quality 0.5."""
    settings: dict[str, Any] = {
        "family": "test",
        "parameters_billions": 1.0,
        "quantisation": "Q4_K_M",
        "context_tokens": 2048,
        "slots": 4,
        "has_chat_template": True,
        "calibration": Calibration(100.0, 10.0, 40.0, 0.5),
        "price": TokenPrice(),
        "mean_quality_ratio": 0.5,
        "quality_source": "prior",
        "quality_count": 0,
        "characters_per_token": 4.0,
        **changes,
    }
    return Destination(NodeId(on), ModelName(model), **settings)


def fleet(nodes: list[Node], destinations: list[Destination]) -> ClusterSnapshot:
    return ClusterSnapshot(tuple(nodes), tuple(destinations))


def request(name: str = "r", **changes: Any) -> InferenceRequest:
    """400 characters, so 100 tokens at 4 characters a token."""
    return InferenceRequest(RequestId(name), **{"prompt": "x" * 400, **changes})
