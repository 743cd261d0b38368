"""The composition root: builds the parts, starts and stops them in order."""

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import anyio
import structlog

from edge_agent.agent import Agent
from edge_agent.config import Settings
from edge_agent.control import ControlServer
from edge_agent.engine.base import InferenceEngine
from edge_agent.engine.memory import available_bytes
from edge_agent.engine.registry import ENGINES, SpecOf
from edge_agent.engine.spec import FetchModel
from edge_agent.errors import AgentError
from edge_agent.identity import HostDescription, describe_host
from edge_agent.introduction import NodeIntroduction
from edge_agent.link.outgoing import Outgoing
from edge_agent.link.session import LinkSession
from edge_agent.reload import plan_reload
from edge_agent.sensors.base import Sensor
from edge_agent.sensors.energy_today import EnergyToday
from edge_agent.sensors.host import ProcessorLoad
from edge_agent.sensors.power_model import PowerModel, power_model
from edge_agent.sensors.sampler import SensorSampler
from edge_agent.sensors.sources import Surroundings, power_sensors, state_sensors, surroundings
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.models import ModelHost
from edge_agent.serving.orders import OrderDesk
from edge_agent.serving.prepare import ModelPreparer
from edge_agent.serving.speeds import Calibrate
from edge_agent.serving.token_energy import TokenEnergy, measure_token_energy
from edge_agent.serving.work import WorkDesk
from edge_agent.status import StatusServer
from edge_agent.systemd import feed_watchdog, notify_reloading, notify_systemd
from edge_agent.telemetry import configure_logs

log = structlog.get_logger()

_FLUSH_SECONDS: Final = 2.0
_ENERGY_SECONDS: Final = 1.0


async def measure(engine: InferenceEngine, slots: int) -> Speeds:
    """The speeds that the controller plans with."""
    from edge_agent.bench import calibrate

    load = ProcessorLoad()
    prefill, decode, saturated = await calibrate(engine, slots)
    return Speeds(prefill, decode, max(decode, saturated), utilisation_ratio=load.ratio())


@dataclass(frozen=True, slots=True)
class Reloading:
    """How new settings reach a running agent.

    Attributes:
        asked: set when they should be read; the agent clears it.
        read: reads them; may block. Raises AgentError when they are wrong.
    """

    asked: asyncio.Event
    read: Callable[[], Settings]


FindSensors = Callable[[Settings], Sequence[Sensor]]


def find_board_sensors(settings: Settings) -> list[Sensor]:
    """Every power sensor that this host may have."""
    power = settings.power
    return power_sensors(surroundings(power.pmic_scale, power.pmic_offset_watts))


async def run(
    settings: Settings,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
    fetch: FetchModel | None = None,
    engines: Sequence[SpecOf] = ENGINES,
    calibrate: Calibrate = measure,
    find_sensors: FindSensors = find_board_sensors,
    reloading: Reloading | None = None,
) -> None:
    """Run the agent until `stop` is set, then drain.

    Args:
        on_ready: called once the status socket answers.
        fetch: finds model files; None takes the catalogue's.
        engines: kinds of engine that models can have.
        calibrate: measures a loaded engine.
        find_sensors: power sensors to try, best first.
        reloading: how new settings come; None takes none.

    Raises:
        AgentError: the data directory is in use or cannot be used.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    host = describe_host()
    sampler = SensorSampler(
        find_sensors(settings), _power_model(host, settings), state_sensors(Surroundings())
    )

    async def measure_energy(engine: InferenceEngine, slots: int) -> TokenEnergy | None:
        if not sampler.has_sensor:
            return None
        return await measure_token_energy(engine, slots, lambda: sampler.totals().total_joules)

    outgoing = Outgoing(settings.controller.address)
    preparer = ModelPreparer(settings)
    models = ModelHost(
        settings,
        fetch or preparer,
        calibrate,
        outgoing.models_changed,
        engines,
        available_bytes=available_bytes(),
        total_bytes=host.memory_bytes,
        measure_energy=measure_energy,
        power_mode=lambda: sampler.readings.power_mode,
    )
    orders = OrderDesk(models)
    power = _power_model(host, settings)
    desk = WorkDesk(
        models.models.get, outgoing, power, sampler, _remote_power(power, settings), models.bring
    )
    agent = Agent(
        settings,
        host,
        power,
        models,
        desk,
        outgoing,
        sampler,
        EnergyToday(settings.data_dir / "energy-today.json"),
        time.monotonic(),
    )
    introduction = NodeIntroduction(agent, uuid.uuid4().hex)
    link = LinkSession(settings.controller, introduction, outgoing, desk, orders, random.Random())
    status = StatusServer(settings.socket_path, agent.snapshot)
    control = ControlServer(settings.control_path, orders)
    await status.start()
    try:
        await control.start()
        await anyio.to_thread.run_sync(sampler.start)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(models.run, name="models")
            tasks.start_soon(link.run, name="link")
            tasks.start_soon(feed_watchdog, agent.is_healthy, name="watchdog")
            tasks.start_soon(_count_energy, agent, name="energy-today")
            if reloading is not None:
                tasks.start_soon(_reload_when_asked, agent, preparer, reloading, name="reload")
            log.info("agent.started", node_id=settings.node_id, data_dir=str(settings.data_dir))
            on_ready()
            await stop.wait()
            log.info("agent.stopping", running_requests=desk.running_requests)
            await outgoing.say_goodbye("the agent is stopping", 1.0)
            await desk.drain(agent.settings.drain_seconds)
            await orders.close()
            await outgoing.flush(_FLUSH_SECONDS)
            agent.stopped()
            tasks.cancel_scope.cancel()
    finally:
        await orders.close()
        await models.close()
        await control.close()
        await status.close()
        await anyio.to_thread.run_sync(sampler.close)
        agent.energy_today.add(sampler.totals().total_joules, time.monotonic())
        agent.energy_today.keep()
    log.info("agent.stopped")


def _power_model(host: HostDescription, settings: Settings) -> PowerModel:
    power = settings.power
    return power_model(host.hardware, host.cpu_cores, power.idle_watts, power.max_watts)


def _remote_power(power: PowerModel, settings: Settings) -> PowerModel | None:
    # What is guessed of this board says nothing of the machine behind a remote engine.
    return None if settings.power.idle_watts is None else power


async def _count_energy(agent: Agent) -> None:
    """Keep today's joules, also while nobody asks for them."""
    while True:
        agent.energy_today.add(agent.sampler.totals().total_joules, time.monotonic())
        await asyncio.sleep(_ENERGY_SECONDS)


async def _reload_when_asked(agent: Agent, preparer: ModelPreparer, reloading: Reloading) -> None:
    """Read the settings again whenever that is asked for; wrong ones change nothing."""
    while True:
        await reloading.asked.wait()
        reloading.asked.clear()
        notify_reloading()
        try:
            new = await anyio.to_thread.run_sync(reloading.read)
        except AgentError as error:
            text = "; ".join(str(error).splitlines())
            log.error("settings.not_reloaded", reason=text)
            agent.refuse_settings(text)
            notify_systemd("READY=1")
        else:
            take_settings(agent, preparer, new)
            notify_systemd("READY=1")
            # Afterwards, for a model that goes may have answers to end first.
            await agent.models.apply(agent.settings)


def take_settings(agent: Agent, preparer: ModelPreparer, new: Settings) -> None:
    """Take what a running agent can take of new settings, and say what needs a restart.

    The models are left to `ModelHost.apply`.
    """
    plan = plan_reload(agent.settings, new)
    if plan.settings.log_level != agent.settings.log_level:
        configure_logs(plan.settings.log_level)
    power = _power_model(agent.host, plan.settings)
    agent.take_settings(plan, power)
    agent.sampler.use_model(power)
    agent.desk.use_power(power, _remote_power(power, plan.settings))
    log.info("settings.reloaded", applied=plan.applied, needs_restart=plan.needs_restart)
    preparer.apply(plan.settings)
