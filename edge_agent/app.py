"""The composition root: builds the parts, starts and stops them in order."""

import asyncio
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import anyio
import structlog

from edge_agent import __version__
from edge_agent.config import Settings
from edge_agent.engine.base import EngineSettings, InferenceEngine
from edge_agent.identity import HostDescription, describe_host, user_name
from edge_agent.lifecycle import AgentState, agent_state
from edge_agent.link.convert import attributes_to_proto, health_to_proto, model_to_proto
from edge_agent.link.session import Introduction, LinkSession
from edge_agent.sensors.base import HostSample, PowerSource, Sensor
from edge_agent.sensors.board import BoardSensor
from edge_agent.sensors.host import HostSensor
from edge_agent.sensors.power_model import PowerModel, power_model
from edge_agent.sensors.sampler import PowerSampler, board_sensors
from edge_agent.serving.models import (
    Calibrate,
    HostedModel,
    MakeEngine,
    ModelHost,
    PrepareModel,
    Speeds,
)
from edge_agent.serving.prepare import ModelPreparer
from edge_agent.serving.work import WorkDesk
from edge_agent.status import StatusObject, StatusServer
from pointsman.v1 import fleet_pb2

log = structlog.get_logger()

_FLUSH_SECONDS: Final = 2.0


@dataclass(slots=True)
class Agent:
    """All parts of a running agent; `snapshot` is what `edge-agent status` shows."""

    settings: Settings
    host: HostDescription
    power: PowerModel
    models: ModelHost
    desk: WorkDesk
    link: LinkSession
    sampler: PowerSampler
    started_at: float
    sample: HostSample | None = None
    is_stopping: bool = False

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
            self.snapshot()
        except Exception:
            log.exception("agent.unhealthy")
            return False
        return True

    def issues(self) -> list[str]:
        """Named conditions that an operator should mend."""
        found = [
            f"{name}: {model.issue}"
            for name, model in self.models.models.items()
            if model.issue and model.phase.value != "loading"
        ]
        if self.link.last_error and not self.link.is_connected:
            found.append(f"controller_unreachable: {self.link.last_error}")
        found += [
            f"power_sensor_unreadable: {text.replace('AGENT_USER', user_name())}"
            for text in self.sampler.unreadable
        ]
        if self.sampler.board.limits:
            found.append(
                f"throttled: {', '.join(self.sampler.board.limits)}; see edge-agent doctor"
            )
        if not self.models.models:
            found.append("no_models: list at least one under [[models]] in the settings")
        return found

    def snapshot(self) -> StatusObject:
        """The stable object of `edge-agent status --json`; keys are only ever added."""
        sample = self.sample
        return {
            "state": self.state.value,
            "node_id": self.settings.node_id,
            "kind": self.settings.kind,
            "agent_version": __version__,
            "hardware": self.settings.hardware or self.host.hardware,
            "uptime_seconds": round(time.monotonic() - self.started_at, 1),
            "controller": {
                "address": self.settings.controller.address,
                "is_connected": self.link.is_connected,
                "connected_seconds": self.link.connected_seconds,
                "last_error": self.link.last_error,
                "unacknowledged_completions": self.link.unacknowledged_completions,
            },
            "models": [_model_status(model) for model in self.models.models.values()],
            "health": None if sample is None else _health_status(sample, self.sampler),
            "energy": _energy_status(self.sampler),
            "requests": {
                "running": self.desk.running_requests,
                "completed": self.desk.completed_requests,
                "failed": self.desk.failed_requests,
                "energy_joules": self.desk.energy_joules,
                "energy_source": _weakest(self.desk.energy_sources),
                "recent": [
                    {
                        "request_id": completion.request_id,
                        "model": completion.model,
                        "outcome": completion.outcome.value,
                        "completion_tokens": completion.completion_tokens,
                        "total_seconds": round(completion.total_seconds, 3),
                        "energy_joules": completion.energy_joules,
                        "energy_source": _name(completion.energy_source),
                        "message": completion.message,
                    }
                    for completion in self.desk.recent
                ],
            },
            "issues": self.issues(),
        }


def _health_status(sample: HostSample, sampler: PowerSampler) -> StatusObject:
    power = sampler.power()
    return {
        "cpu_utilisation_ratio": sample.cpu_utilisation_ratio,
        "gpu_utilisation_ratio": sampler.board.gpu_utilisation_ratio,
        "memory_available_bytes": sample.memory_available_bytes,
        "temperature_celsius": sample.temperature_celsius,
        "is_throttled": sample.is_throttled,
        "limits": list(sampler.board.limits),
        "power_watts": power.power_watts,
        "power_source": _name(power.source),
        "power_coverage": None if power.coverage is None else power.coverage.value,
        "power_relative_error": power.relative_error,
        "power_sample_hertz": power.sample_hertz,
        "power_age_seconds": power.age_seconds,
        "power_detail": power.detail,
    }


def _energy_status(sampler: PowerSampler) -> StatusObject:
    totals = sampler.totals()
    return {
        "total_joules": totals.total_joules,
        "requests_joules": totals.requests_joules,
        "idle_joules": totals.idle_joules,
        "measured_seconds": totals.measured_seconds,
        "estimated_seconds": totals.estimated_seconds,
    }


def _name(source: PowerSource | None) -> str:
    return "none" if source is None else source.value


def _weakest(sources: set[PowerSource]) -> str:
    """The one source of a sum; a sum of several is no better than an estimate."""
    return _name(next(iter(sources))) if len(sources) == 1 else PowerSource.ESTIMATE.value


def _model_status(model: HostedModel) -> StatusObject:
    stats = model.engine.stats() if model.engine else None
    return {
        "name": model.settings.name,
        "phase": model.phase.value,
        "issue": model.issue or None,
        "slots": stats.slots if stats else model.settings.slots,
        "busy_slots": stats.busy_slots if stats else 0,
        "queued_requests": stats.queued_requests if stats else 0,
        "context_tokens": model.loaded.context_tokens if model.loaded else None,
        "resident_bytes": stats.resident_bytes if stats else None,
        "prefill_tokens_per_second": model.speeds.prefill_rate if model.speeds else None,
        "decode_tokens_per_second": model.speeds.decode_rate if model.speeds else None,
        "saturated_decode_tokens_per_second": model.speeds.saturated_decode_rate
        if model.speeds
        else None,
    }


def make_llama_engine(settings: EngineSettings) -> InferenceEngine:
    """The engine that `edge-agent run` uses."""
    from edge_agent.engine.supervisor import SupervisedEngine

    return SupervisedEngine(settings)


async def measure(engine: InferenceEngine, slots: int) -> Speeds:
    """The speeds that the controller plans with."""
    from edge_agent.bench import calibrate

    prefill, decode, saturated = await calibrate(engine, slots)
    return Speeds(prefill, decode, max(decode, saturated))


FindSensors = Callable[[Settings], Sequence[Sensor]]


def find_board_sensors(settings: Settings) -> list[Sensor]:
    """Every sensor that this host may have."""
    power = settings.power
    return board_sensors(pmic_scale=power.pmic_scale, pmic_offset_watts=power.pmic_offset_watts)


async def run(
    settings: Settings,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
    prepare: PrepareModel | None = None,
    make_engine: MakeEngine = make_llama_engine,
    calibrate: Calibrate = measure,
    find_sensors: FindSensors = find_board_sensors,
) -> None:
    """Run the agent until `stop` is set, then drain.

    Args:
        on_ready: called once the status socket answers.
        prepare: finds model files; None takes the catalogue's.
        make_engine: what decodes.
        calibrate: measures a loaded engine.
        find_sensors: power sensors to try, best first.

    Raises:
        AgentError: the data directory is in use or cannot be used.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    host = describe_host()
    power = power_model(
        host.hardware, host.cpu_cores, settings.power.idle_watts, settings.power.max_watts
    )
    sensor = HostSensor()
    sampler = PowerSampler(find_sensors(settings), power, BoardSensor())

    def look() -> HostSample:
        sample, board = sensor.read(), sampler.board
        sampler.saw_utilisation(sample.cpu_utilisation_ratio)
        if board.temperature_celsius is not None:
            sample = replace(sample, temperature_celsius=board.temperature_celsius)
        return replace(sample, is_throttled=board.is_throttled)

    def attributes() -> fleet_pb2.StaticAttributes:
        loaded = [m.loaded for m in models.models.values() if m.loaded]
        message = attributes_to_proto(
            host,
            settings.kind,
            __version__,
            loaded[0].engine_version if loaded else "",
            power,
            settings.power.transmit_watts,
            settings.power.receive_watts,
        )
        if settings.hardware:
            message.hardware = settings.hardware
        return message

    def health() -> fleet_pb2.HealthSample:
        agent.sample = look()
        return health_to_proto(
            agent.sample, power, list(models.models.values()), agent.issues(), sampler.power()
        )

    link = LinkSession(
        settings.controller,
        Introduction(
            settings.node_id,
            uuid.uuid4().hex,
            attributes,
            lambda: [model_to_proto(model) for model in models.models.values()],
            health,
        ),
        lambda: desk,
        random.Random(),
    )
    models = ModelHost(
        settings,
        prepare or ModelPreparer(settings),
        make_engine,
        calibrate,
        link.models_changed,
    )
    # What is guessed of this board says nothing of the machine behind a remote engine.
    remote_power = None if settings.power.idle_watts is None else power
    desk = WorkDesk(models.models.get, link, power, sampler, remote_power)
    agent = Agent(settings, host, power, models, desk, link, sampler, time.monotonic())
    status = StatusServer(settings.socket_path, agent.snapshot)
    await status.start()
    try:
        sampler.start()
        agent.sample = look()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(models.run, name="models")
            tasks.start_soon(link.run, name="link")
            tasks.start_soon(feed_watchdog, agent.is_healthy, name="watchdog")
            log.info("agent.started", node_id=settings.node_id, data_dir=str(settings.data_dir))
            on_ready()
            await stop.wait()
            log.info("agent.stopping", running_requests=desk.running_requests)
            await link.say_goodbye("the agent is stopping", 1.0)
            await desk.drain(settings.drain_seconds)
            await link.flush(_FLUSH_SECONDS)
            agent.is_stopping = True
            tasks.cancel_scope.cancel()
    finally:
        await models.close()
        await status.close()
        await anyio.to_thread.run_sync(sampler.close)
    log.info("agent.stopped")


def watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """How often systemd wants to hear of us; None when it does not watch this process."""
    try:
        microseconds = int(environ.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    if microseconds <= 0 or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return microseconds / 1e6


async def feed_watchdog(is_healthy: Callable[[], bool]) -> None:
    """Tell systemd at half of its time-out that the agent is well, for as long as it is.

    It runs on the event loop, so that a loop that stands still is noticed as well.
    """
    seconds = watchdog_seconds(os.environ)
    while seconds is not None:
        if is_healthy():
            notify_systemd("WATCHDOG=1")
        await anyio.sleep(seconds / 2.0)


def notify_systemd(message: str) -> None:
    """Tell systemd how the service is doing (sd_notify); nothing happens outside it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendall(message.encode())
        except OSError as error:
            log.warning("systemd.not_notified", error=error.strerror)
