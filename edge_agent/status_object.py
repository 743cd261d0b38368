"""The object of `edge-agent status --json`: scripts read it, so fields are only ever added.

The names and the order of the fields are those of the JSON. None is unknown, or not so.
"""

from dataclasses import asdict, dataclass
from typing import Any

from edge_agent.sensors.base import SensorStatus


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """The link to the controller."""

    address: str
    is_connected: bool
    connected_seconds: float | None
    last_error: str | None
    unacknowledged_completions: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model of the settings.

    Attributes:
        resident_bytes: held by its engine now.
        reserved_bytes: counted against the budget.
        progress_ratio: of what is under way, such as a download.
        power_mode: of the board when its speeds were measured.
    """

    name: str
    phase: str
    issue: str | None
    slots: int
    busy_slots: int
    queued_requests: int
    context_tokens: int | None
    resident_bytes: int | None
    reserved_bytes: int | None
    is_pinned: bool
    progress_ratio: float | None
    power_mode: str | None
    prefill_joules_per_token: float | None
    decode_joules_per_token: float | None
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    saturated_decode_tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """The last sample of the host, and its power now."""

    cpu_utilisation_ratio: float
    gpu_utilisation_ratio: float | None
    memory_available_bytes: int
    temperature_celsius: float | None
    is_throttled: bool | None
    limits: tuple[str, ...]
    power_watts: float | None
    power_source: str
    power_coverage: str | None
    power_relative_error: float | None
    power_sample_hertz: float | None
    power_age_seconds: float | None
    power_detail: str
    power_mode: str | None


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """What the models may hold, and do hold."""

    budget_bytes: int
    reserved_bytes: int
    largest_free_block_bytes: int | None


@dataclass(frozen=True, slots=True)
class EnergyStatus:
    """The board's joules since the agent started, and today's."""

    today_joules: float | None
    total_joules: float
    requests_joules: float
    idle_joules: float
    measured_seconds: float
    estimated_seconds: float


@dataclass(frozen=True, slots=True)
class CompletionStatus:
    """One request that has ended."""

    request_id: str
    model: str
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    total_seconds: float
    ended_seconds_ago: float | None
    energy_joules: float | None
    prefill_joules: float | None
    decode_joules: float | None
    energy_source: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestsStatus:
    """Requests since the agent started; `recent` are the last ones, newest first."""

    running: int
    completed: int
    failed: int
    energy_joules: float
    prefill_joules: float
    decode_joules: float
    energy_source: str
    recent: tuple[CompletionStatus, ...]


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """Everything that `edge-agent status` shows."""

    state: str
    node_id: str
    kind: str
    agent_version: str
    hardware: str
    uptime_seconds: float
    needs_reboot: bool
    controller: ControllerStatus
    models: tuple[ModelStatus, ...]
    health: HealthStatus | None
    memory: MemoryStatus
    energy: EnergyStatus
    requests: RequestsStatus
    issues: tuple[str, ...]
    sensors: tuple[SensorStatus, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON's objects."""
        return asdict(self)
