"""A running agent's parts, and what they tell of it."""

import time
from dataclasses import dataclass, field, replace

import structlog

from edge_agent import __version__
from edge_agent.agent_state import AgentState, agent_state
from edge_agent.config import Settings
from edge_agent.engine.memory import largest_free_block_bytes
from edge_agent.errors import EngineFailure
from edge_agent.identity import HostDescription, user_name
from edge_agent.link.outgoing import Outgoing
from edge_agent.reload import ReloadPlan
from edge_agent.sensors.base import ESTIMATE
from edge_agent.sensors.energy_today import EnergyToday
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.sampler import SensorSampler
from edge_agent.serving.completion import Completion
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.lifecycle import ModelPhase
from edge_agent.serving.models import ModelHost
from edge_agent.serving.work import WorkDesk
from edge_agent.status import StatusObject
from edge_agent.status_object import (
    AgentStatus,
    CompletionStatus,
    ControllerStatus,
    EnergyStatus,
    HealthStatus,
    MemoryStatus,
    ModelStatus,
    RequestsStatus,
)

log = structlog.get_logger()


@dataclass(slots=True)
class Agent:
    """All parts of a running agent; `snapshot` is what `edge-agent status` shows."""

    settings: Settings
    host: HostDescription
    power: PowerModel
    models: ModelHost
    desk: WorkDesk
    link: Outgoing
    sampler: SensorSampler
    energy_today: EnergyToday
    started_at: float
    is_stopping: bool = False
    reload_issues: list[str] = field(default_factory=list)

    def take_settings(self, plan: ReloadPlan, power: PowerModel) -> None:
        """Go by what a running agent can take of new settings, and say what needs a restart."""
        self.settings, self.power = plan.settings, power
        self.reload_issues = [
            f"restart_needed: {name} has changed; systemctl restart edge-agent"
            for name in plan.needs_restart
        ]

    def refuse_settings(self, reason: str) -> None:
        """Say that new settings are wrong."""
        self.reload_issues = [f"settings_invalid: the old ones stay in force: {reason}"]

    def stopped(self) -> None:
        """Nothing runs any more."""
        self.is_stopping = True

    @property
    def state(self) -> AgentState:
        """What the agent is doing."""
        return agent_state(
            self.is_stopping,
            self.desk.is_draining,
            self.link.is_connected,
            [model.phase for model in self.models.models.values()],
        )

    def is_healthy(self) -> bool:
        """Whether every part can still say how it is; the event loop's own life is implied."""
        try:
            self.status()
        except Exception:
            log.exception("agent.unhealthy")
            return False
        return True

    def issues(self) -> list[str]:
        """Named conditions that an operator should mend."""
        found = [
            f"{name}: {model.issue}"
            for name, model in self.models.models.items()
            if model.issue and model.phase in (ModelPhase.READY, ModelPhase.FAILED)
        ]
        if self.link.last_error and not self.link.is_connected:
            found.append(f"controller_unreachable: {self.link.last_error}")
        found += [
            f"power_sensor_unreadable: {text.replace('AGENT_USER', user_name())}"
            for text in self.sampler.unreadable
        ]
        limits = self.sampler.readings.limits
        if limits:
            found.append(f"throttled: {', '.join(limits)}; see edge-agent doctor")
        if self.needs_reboot:
            found.append(
                "reboot_needed: the GPU's memory stays short or fragmented; drop the caches as the"
                " model's issue says, and reboot this board if it comes back"
            )
        found += self.reload_issues
        if not self.models.models:
            found.append("no_models: list at least one under [[models]] in the settings")
        return found

    @property
    def needs_reboot(self) -> bool:
        """Whether a model cannot be had until the board's memory is in one piece again."""
        return any(
            model.failure is EngineFailure.GPU_MEMORY_FRAGMENTED
            for model in self.models.models.values()
        )

    def snapshot(self) -> StatusObject:
        """The stable object of `edge-agent status --json`."""
        return self.status().to_json()

    def status(self) -> AgentStatus:
        """What the agent and its parts are doing now."""
        now = time.monotonic()
        return AgentStatus(
            state=self.state.value,
            node_id=self.settings.node_id,
            kind=self.settings.kind,
            agent_version=__version__,
            hardware=self.settings.hardware or self.host.hardware,
            uptime_seconds=round(now - self.started_at, 1),
            needs_reboot=self.needs_reboot,
            controller=ControllerStatus(
                address=self.settings.controller.address,
                is_connected=self.link.is_connected,
                connected_seconds=self.link.connected_seconds,
                last_error=self.link.last_error,
                unacknowledged_completions=self.link.unacknowledged_completions,
            ),
            models=tuple(_model_status(model) for model in self.models.models.values()),
            health=_health_status(self.sampler),
            memory=MemoryStatus(
                budget_bytes=self.models.budget_bytes,
                reserved_bytes=self.models.reserved_bytes,
                largest_free_block_bytes=largest_free_block_bytes(),
            ),
            energy=_energy_status(self.sampler, self.energy_today, now),
            requests=_requests_status(self.desk, now),
            issues=tuple(self.issues()),
            sensors=tuple(
                replace(sensor, fix=sensor.fix.replace("AGENT_USER", user_name()))
                for sensor in self.sampler.sensors
            ),
        )


def _requests_status(desk: WorkDesk, now: float) -> RequestsStatus:
    return RequestsStatus(
        running=desk.running_requests,
        completed=desk.completed_requests,
        failed=desk.failed_requests,
        energy_joules=desk.energy_joules,
        prefill_joules=desk.prefill_joules,
        decode_joules=desk.decode_joules,
        energy_source=_weakest(desk.energy_sources),
        recent=tuple(_completion_status(entry, now) for entry in desk.recent),
    )


def _completion_status(completion: Completion, now: float) -> CompletionStatus:
    ended_at, usage = completion.ended_at, completion.usage
    return CompletionStatus(
        request_id=completion.request_id,
        model=completion.model,
        outcome=completion.outcome.value,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_seconds=round(completion.total_seconds, 3),
        ended_seconds_ago=None if ended_at is None else round(now - ended_at, 1),
        energy_joules=usage.energy_joules,
        prefill_joules=usage.prefill_joules,
        decode_joules=usage.decode_joules,
        energy_source=usage.energy_source,
        message=completion.message,
    )


def _health_status(sampler: SensorSampler) -> HealthStatus | None:
    readings, power = sampler.readings, sampler.power()
    if readings.cpu_utilisation_ratio is None or readings.memory_available_bytes is None:
        return None  # the agent is starting
    return HealthStatus(
        cpu_utilisation_ratio=readings.cpu_utilisation_ratio,
        gpu_utilisation_ratio=readings.gpu_utilisation_ratio,
        memory_available_bytes=readings.memory_available_bytes,
        temperature_celsius=readings.temperature_celsius,
        is_throttled=readings.is_throttled,
        limits=readings.limits,
        power_watts=power.power_watts,
        power_source=_name(power.source),
        power_coverage=None if power.coverage is None else power.coverage.value,
        power_relative_error=power.relative_error,
        power_sample_hertz=power.sample_hertz,
        power_age_seconds=power.age_seconds,
        power_detail=power.detail,
        power_mode=readings.power_mode or None,
    )


def _energy_status(sampler: SensorSampler, today: EnergyToday, now: float) -> EnergyStatus:
    totals = sampler.totals()
    return EnergyStatus(
        today_joules=today.add(totals.total_joules, now),
        total_joules=totals.total_joules,
        requests_joules=totals.requests_joules,
        idle_joules=totals.idle_joules,
        measured_seconds=totals.measured_seconds,
        estimated_seconds=totals.estimated_seconds,
    )


def _name(source: str | None) -> str:
    return source or "none"


def _weakest(sources: set[str]) -> str:
    """The one source of a sum; a sum of several is no better than an estimate."""
    return _name(next(iter(sources))) if len(sources) == 1 else ESTIMATE


def _model_status(model: HostedModel) -> ModelStatus:
    stats = model.engine.stats() if model.engine else None
    speeds = model.speeds
    return ModelStatus(
        name=model.settings.name,
        phase=model.phase.value,
        issue=model.issue or None,
        slots=stats.slots if stats else model.settings.slots,
        busy_slots=stats.busy_slots if stats else 0,
        queued_requests=stats.queued_requests if stats else 0,
        context_tokens=model.loaded.context_tokens if model.loaded else None,
        resident_bytes=stats.resident_bytes if stats else None,
        reserved_bytes=model.reserved_bytes or None,
        is_pinned=model.is_pinned,
        progress_ratio=model.progress_ratio,
        power_mode=speeds.power_mode or None if speeds else None,
        prefill_joules_per_token=speeds.prefill_joules_per_token if speeds else None,
        decode_joules_per_token=speeds.decode_joules_per_token if speeds else None,
        prefill_tokens_per_second=speeds.prefill_tokens_per_second if speeds else None,
        decode_tokens_per_second=speeds.decode_tokens_per_second if speeds else None,
        saturated_decode_tokens_per_second=speeds.saturated_decode_tokens_per_second
        if speeds
        else None,
    )
