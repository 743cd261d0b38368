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
    UNLOADED = "unloaded"
    DOWNLOADING = "downloading"


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """One model on a node.

    Attributes:
        calibration: None until it has been measured there.
        refuses_raw_prompts: takes only chats.
        is_pinned: never unloaded to make room or for being idle.
        progress_ratio: 0 to 1 while downloading or loading; None when unknown.
        resident_bytes: memory it takes while loaded; None when unknown.
        supports_response_format: keeps a `ResponseFormat`.
    """

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
    refuses_raw_prompts: bool = False
    is_pinned: bool = False
    progress_ratio: float | None = None
    resident_bytes: int | None = None
    supports_response_format: bool = False


@dataclass(frozen=True, slots=True)
class NodeAttributes:
    """What does not change while the agent runs.

    Attributes:
        power: None when unknown.
        is_link_metered: traffic costs money or is capped, so nothing is sent merely to measure.
        receive_usd_per_byte, transmit_usd_per_byte: of the link, to the node and from it.
    """

    kind: NodeKind
    hardware: str
    cpu_cores: int
    memory_bytes: int
    operating_system: str
    agent_version: str
    engine_version: str
    power: PowerProfile | None
    is_link_metered: bool = False
    receive_usd_per_byte: float = 0.0
    transmit_usd_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeHello:
    """How a node introduces itself."""

    node_id: NodeId
    instance_id: str
    attributes: NodeAttributes
    models: tuple[ReportedModel, ...]


@dataclass(frozen=True, slots=True)
class SensorState:
    """How one sensor of a node did with its last reading."""

    name: str
    is_working: bool
    read_seconds: float


@dataclass(frozen=True, slots=True)
class Health:
    """One sample; None where the board cannot tell, an empty `power_mode` where it has none.

    Attributes:
        power_source: the sensor's name, "estimate" or "none".
    """

    uptime_seconds: float
    cpu_utilisation_ratio: float
    memory_available_bytes: int
    temperature_celsius: float | None
    power_watts: float | None
    power_source: str
    is_throttled: bool | None
    issues: tuple[str, ...]
    power_mode: str = ""
    gpu_utilisation_ratio: float | None = None
    energy_today_joules: float | None = None
    sensors: tuple[SensorState, ...] = ()
