"""Between pointsman.v1 and the agent's own values."""

from collections.abc import Sequence
from typing import Final

from edge_agent.config import LinkSettings
from edge_agent.engine.base import Message
from edge_agent.identity import HostDescription
from edge_agent.sensors.base import ESTIMATE, Readings, SensorStatus
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.sampler import PowerState
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.completion import Completion
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.lifecycle import ModelPhase
from edge_agent.serving.work import WorkOrder
from pointsman.codec import Codec, enum_to_wire
from pointsman.convert import (
    FAILURES,
    FINISH_REASONS,
    SAMPLING,
    USAGE,
    response_format_from_proto,
    source_number,
)
from pointsman.v1 import fleet_pb2, types_pb2

_PHASES: Final = enum_to_wire(ModelPhase, fleet_pb2.ModelPhase.DESCRIPTOR)

_CALIBRATION: Final = Codec(
    Speeds,
    fleet_pb2.Calibration,
)
_TURN: Final = Codec(Message, types_pb2.ChatMessage)


def attributes_to_proto(
    host: HostDescription,
    kind: str,
    agent_version: str,
    engine_version: str,
    power: PowerModel | None,
    transmit_watts: float | None,
    receive_watts: float | None,
    link: LinkSettings,
) -> fleet_pb2.StaticAttributes:
    """What does not change while the agent runs."""
    message = fleet_pb2.StaticAttributes(
        kind=types_pb2.NODE_KIND_CLOUD if kind == "cloud" else types_pb2.NODE_KIND_EDGE,
        hardware=host.hardware,
        cpu_cores=host.cpu_cores,
        memory_bytes=host.memory_bytes,
        operating_system=host.operating_system,
        agent_version=agent_version,
        engine_version=engine_version,
        power_source=types_pb2.POWER_SOURCE_NONE,
        transmit_watts=transmit_watts,
        receive_watts=receive_watts,
        is_link_metered=link.is_metered
        or link.receive_usd_per_gigabyte > 0
        or link.transmit_usd_per_gigabyte > 0,
        receive_usd_per_gigabyte=link.receive_usd_per_gigabyte,
        transmit_usd_per_gigabyte=link.transmit_usd_per_gigabyte,
    )
    if power is not None:
        message.idle_watts = power.idle_watts
        message.max_watts = power.max_watts
        message.power_source = types_pb2.POWER_SOURCE_ESTIMATE
    return message


def model_to_proto(model: HostedModel) -> fleet_pb2.ModelState:
    """One model of this node, with its own measured speeds once they exist."""
    settings, prepared, loaded = model.settings, model.prepared, model.loaded
    message = fleet_pb2.ModelState(
        name=settings.name,
        phase=_PHASES[model.phase],
        issue=model.issue,
        slots=loaded.slots if loaded else settings.slots,
        price=fleet_pb2.TokenPrice(
            prompt_usd_per_token=settings.prompt_usd_per_token,
            completion_usd_per_token=settings.completion_usd_per_token,
            request_usd=settings.request_usd,
        ),
        is_pinned=model.is_pinned,
        progress_ratio=model.progress_ratio,
        resident_bytes=model.resident_bytes,
        refuses_raw_prompts=model.refuses_raw_prompts,
    )
    if prepared is not None:
        message.family = prepared.family
        message.parameters_billions = prepared.parameters_billions
        message.quantisation = prepared.quantisation
        message.digest = prepared.digest
        message.context_tokens = prepared.context_tokens
        message.is_base_model = prepared.is_base_model
    if loaded is not None:
        message.context_tokens = loaded.context_tokens
        message.has_chat_template = loaded.has_chat_template
        message.supports_response_format = loaded.supports_response_format
        if loaded.characters_per_token is not None:
            message.characters_per_token = loaded.characters_per_token
    if model.speeds is not None:
        message.calibration.CopyFrom(_CALIBRATION.write(model.speeds))
    return message


def health_to_proto(
    readings: Readings,
    power: PowerState,
    issues: Sequence[str] = (),
    sensors: Sequence[SensorStatus] = (),
    energy_today_joules: float | None = None,
) -> fleet_pb2.HealthSample:
    """One health sample.

    Args:
        readings: of all sensors, merged.
        power: measured, or an estimate that says so.
        energy_today_joules: since local midnight; None when nobody knows.
    """
    message = fleet_pb2.HealthSample(
        # Every host knows these three, so the wire has no absence for them.
        uptime_seconds=readings.uptime_seconds or 0.0,
        cpu_utilisation_ratio=readings.cpu_utilisation_ratio or 0.0,
        memory_available_bytes=readings.memory_available_bytes or 0,
        temperature_celsius=readings.temperature_celsius,
        power_watts=power.power_watts,
        power_source=source_number(power.source or "none"),
        power_source_name=power.source or "none",
        is_power_estimate=power.source == ESTIMATE,
        is_throttled=readings.is_throttled,
        issues=issues,
        power_mode=readings.power_mode,
        gpu_utilisation_ratio=readings.gpu_utilisation_ratio,
        energy_today_joules=energy_today_joules,
        sensors=[
            fleet_pb2.SensorState(
                name=sensor.name, is_working=sensor.is_working, read_seconds=sensor.read_seconds
            )
            for sensor in sensors
        ],
    )
    message.sample_time.GetCurrentTime()
    return message


def work_from_proto(message: fleet_pb2.WorkOrder) -> WorkOrder:
    """A work order; the controller fills in every sampling default."""
    prompt: str | tuple[Message, ...] = message.prompt
    if message.WhichOneof("input") == "chat":
        prompt = tuple(map(_TURN.read, message.chat.messages))
    return WorkOrder(
        request_id=message.request_id,
        attempt=message.attempt,
        model=message.model,
        prompt=prompt,
        sampling=SAMPLING.read(message.sampling),
        time_limit_seconds=message.time_limit_seconds or 900.0,
        response_format=response_format_from_proto(message.response_format),
        session_id=message.session_id,
    )


def completion_to_proto(completion: Completion) -> fleet_pb2.Completion:
    """The end of a work order."""
    message = fleet_pb2.Completion(
        request_id=completion.request_id,
        attempt=completion.attempt,
        model=completion.model,
        finish_reason=FINISH_REASONS[completion.outcome],
        usage=USAGE.write(completion.usage),
    )
    if completion.failure is not None:
        message.failure.kind = FAILURES[completion.failure]
        message.failure.message = completion.message
    return message
