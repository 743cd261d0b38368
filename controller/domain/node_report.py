"""What a node says about itself."""

import enum
from dataclasses import dataclass

from controller.domain.cluster import Calibration, NodeKind, PowerProfile, TokenPrice
from controller.ids import ModelName, NodeId


class ModelPhase(enum.Enum):
    """Only READY models are destinations."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """One model on a node; `calibration` is None until it has been measured there."""

    name: ModelName
    family: str
    parameters_billions: float
    quantisation: str
    digest: str
    phase: ModelPhase
    issue: str
    context_tokens: int
    slots: int
    calibration: Calibration | None
    price: TokenPrice
    has_chat_template: bool
    characters_per_token: float | None
    is_base_model: bool = False


@dataclass(frozen=True, slots=True)
class NodeAttributes:
    """What does not change while the agent runs; `power` is None when unknown."""

    kind: NodeKind
    hardware: str
    cpu_cores: int
    memory_bytes: int
    operating_system: str
    agent_version: str
    engine_version: str
    power: PowerProfile | None


@dataclass(frozen=True, slots=True)
class NodeHello:
    """How a node introduces itself."""

    node_id: NodeId
    instance_id: str
    attributes: NodeAttributes
    models: tuple[ReportedModel, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """One sample; None where the board cannot tell."""

    uptime_seconds: float
    cpu_utilisation_ratio: float
    memory_available_bytes: int
    temperature_celsius: float | None
    power_watts: float | None
    power_source: str
    is_throttled: bool | None
    busy_slots: tuple[tuple[ModelName, int], ...]
    issues: tuple[str, ...]
