"""The composition root: builds the parts, starts and stops them in order."""

import asyncio
import os
import random
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import structlog

from edge_agent import __version__
from edge_agent.config import Settings
from edge_agent.engine.base import EngineSettings, InferenceEngine
from edge_agent.identity import HostDescription, describe_host
from edge_agent.lifecycle import AgentState, agent_state
from edge_agent.link.convert import attributes_to_proto, health_to_proto, model_to_proto
from edge_agent.link.session import Introduction, LinkSession
from edge_agent.sensors.base import HostSample
from edge_agent.sensors.host import HostSensor
from edge_agent.sensors.power_model import PowerModel, power_model
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

_FLUSH_SECONDS = 2.0


@dataclass(slots=True)
class Agent:
    """All parts of a running agent; `snapshot` is what `edge-agent status` shows."""

    settings: Settings
    host: HostDescription
    power: PowerModel
    models: ModelHost
    desk: WorkDesk
    link: LinkSession
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

    def issues(self) -> list[str]:
        """Named conditions that an operator should mend."""
        found = [
            f"{name}: {model.issue}"
            for name, model in self.models.models.items()
            if model.issue and model.phase.value != "loading"
        ]
        if self.link.last_error and not self.link.is_connected:
            found.append(f"controller_unreachable: {self.link.last_error}")
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
            "health": None
            if sample is None
            else {
                "cpu_utilisation_ratio": sample.cpu_utilisation_ratio,
                "memory_available_bytes": sample.memory_available_bytes,
                "temperature_celsius": sample.temperature_celsius,
                "is_throttled": sample.is_throttled,
                "power_watts": self.power.watts(sample.cpu_utilisation_ratio),
                "power_source": "estimate",
            },
            "requests": {
                "running": self.desk.running_requests,
                "completed": self.desk.completed_requests,
                "failed": self.desk.failed_requests,
                "energy_joules": self.desk.energy_joules,
                "energy_source": "estimate",
                "recent": [
                    {
                        "request_id": completion.request_id,
                        "model": completion.model,
                        "outcome": completion.outcome.value,
                        "completion_tokens": completion.completion_tokens,
                        "total_seconds": round(completion.total_seconds, 3),
                        "energy_joules": completion.energy_joules,
                        "message": completion.message,
                    }
                    for completion in self.desk.recent
                ],
            },
            "issues": self.issues(),
        }


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


async def run(
    settings: Settings,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
    prepare: PrepareModel | None = None,
    make_engine: MakeEngine = make_llama_engine,
    calibrate: Calibrate = measure,
) -> None:
    """Run the agent until `stop` is set, then drain.

    Args:
        on_ready: called once the status socket answers.
        prepare: finds model files; None takes the catalogue's.
        make_engine: what decodes.
        calibrate: measures a loaded engine.

    Raises:
        AgentError: the data directory is in use or cannot be used.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    host = describe_host()
    power = power_model(
        host.hardware, host.cpu_cores, settings.power.idle_watts, settings.power.max_watts
    )
    sensor = HostSensor()

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
        agent.sample = sensor.read()
        return health_to_proto(agent.sample, power, list(models.models.values()), agent.issues())

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
    desk = WorkDesk(models.models.get, link, power)
    agent = Agent(settings, host, power, models, desk, link, time.monotonic())
    status = StatusServer(settings.socket_path, agent.snapshot)
    await status.start()
    try:
        agent.sample = sensor.read()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(models.run, name="models")
            tasks.start_soon(link.run, name="link")
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
    log.info("agent.stopped")


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
