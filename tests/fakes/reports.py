"""What nodes say of themselves, in the controller's own values."""

from typing import Any

from controller.domain.cluster import (
    Calibration,
    ClusterSnapshot,
    NodeKind,
    PowerProfile,
    TokenPrice,
)
from controller.domain.node_report import (
    Health,
    ModelPhase,
    NodeAttributes,
    NodeHello,
    ReportedModel,
)
from controller.ids import ModelName, NodeId
from controller.profiler.events import HealthReported, NodeConnected
from controller.profiler.state import ProfilerState

SPEEDS = Calibration(200.0, 20.0, 60.0)


def reported_model(name: str = "small", **changes: Any) -> ReportedModel:
    """A loaded, measured model of one billion parameters, free of charge."""
    fields: dict[str, Any] = {
        "family": "test",
        "parameters_billions": 1.0,
        "quantisation": "Q4_K_M",
        "digest": "0" * 64,
        "phase": ModelPhase.READY,
        "issue": "",
        "context_tokens": 2048,
        "slots": 4,
        "calibration": SPEEDS,
        "price": TokenPrice(),
        "has_chat_template": True,
        "characters_per_token": 4.0,
        **changes,
    }
    return ReportedModel(ModelName(name), **fields)


def hello(
    node_id: str = "pi",
    models: tuple[ReportedModel, ...] = (reported_model(),),
    instance_id: str = "first-start",
    kind: NodeKind = NodeKind.EDGE,
) -> NodeHello:
    """An introduction of a board with four cores."""
    return NodeHello(
        NodeId(node_id),
        instance_id,
        NodeAttributes(
            kind, "Board", 4, 4_000_000_000, "Linux", "0.1.0", "fake", PowerProfile(3.0, 12.0)
        ),
        models,
    )


def health(**changes: Any) -> Health:
    """A healthy sample."""
    fields: dict[str, Any] = {
        "uptime_seconds": 100.0,
        "cpu_utilisation_ratio": 0.1,
        "memory_available_bytes": 1_000_000_000,
        "temperature_celsius": 50.0,
        "power_watts": 4.0,
        "power_source": "estimate",
        "is_throttled": None,
        "issues": (),
        **changes,
    }
    return Health(**fields)


def join(profiler: ProfilerState, now: float, introduction: NodeHello | None = None) -> NodeId:
    """Connect a node and report its health, so that it takes work; returns its id."""
    introduction = introduction or hello()
    profiler.apply(NodeConnected(introduction, False), now)
    profiler.apply(HealthReported(introduction.node_id, health()), now)
    return introduction.node_id


def routable_nodes(snapshot: ClusterSnapshot) -> set[str]:
    """Nodes that take work."""
    return {node.node_id for node in snapshot.nodes if node.refusal is None}
