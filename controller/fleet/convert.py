"""Between pointsman.v1 fleet messages and the domain."""

import math
from collections.abc import Iterable

from controller.domain.cluster import Calibration, NodeKind, PowerProfile, TokenPrice
from controller.domain.completion import Completion, FailureKind, FinishReason, Usage
from controller.domain.node_report import (
    Health,
    ModelPhase,
    NodeAttributes,
    NodeHello,
    ReportedModel,
)
from controller.domain.request import InferenceRequest, Sampling
from controller.ids import ModelName, NodeId
from pointsman.v1 import fleet_pb2, types_pb2

_PHASES = {
    fleet_pb2.MODEL_PHASE_LOADING: ModelPhase.LOADING,
    fleet_pb2.MODEL_PHASE_READY: ModelPhase.READY,
    fleet_pb2.MODEL_PHASE_FAILED: ModelPhase.FAILED,
}
_PHASES_OUT = {phase: value for value, phase in _PHASES.items()}

_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    types_pb2.FINISH_REASON_FAILED: FinishReason.FAILED,
}
_REASONS_OUT = {reason: value for value, reason in _REASONS.items()}

_FAILURES = {
    fleet_pb2.WORK_FAILURE_KIND_MODEL_NOT_LOADED: FailureKind.MODEL_NOT_LOADED,
    fleet_pb2.WORK_FAILURE_KIND_DRAINING: FailureKind.DRAINING,
    fleet_pb2.WORK_FAILURE_KIND_QUEUE_FULL: FailureKind.QUEUE_FULL,
    fleet_pb2.WORK_FAILURE_KIND_INVALID_REQUEST: FailureKind.INVALID_REQUEST,
    fleet_pb2.WORK_FAILURE_KIND_CONTEXT_EXCEEDED: FailureKind.CONTEXT_EXCEEDED,
    fleet_pb2.WORK_FAILURE_KIND_ENGINE_CRASHED: FailureKind.ENGINE_CRASHED,
    fleet_pb2.WORK_FAILURE_KIND_TIME_LIMIT: FailureKind.TIME_LIMIT,
    fleet_pb2.WORK_FAILURE_KIND_INTERNAL: FailureKind.INTERNAL,
}

_POWER_SOURCES = {
    types_pb2.POWER_SOURCE_UNSPECIFIED: "none",
    types_pb2.POWER_SOURCE_NONE: "none",
    types_pb2.POWER_SOURCE_ESTIMATE: "estimate",
    types_pb2.POWER_SOURCE_RAPL: "rapl",
    types_pb2.POWER_SOURCE_INA3221: "ina3221",
    types_pb2.POWER_SOURCE_NVML: "nvml",
    types_pb2.POWER_SOURCE_PMIC: "pmic",
}
_POWER_SOURCES_OUT = {
    name: value
    for value, name in _POWER_SOURCES.items()
    if value != types_pb2.POWER_SOURCE_UNSPECIFIED
}


class BadReportError(ValueError):
    """A node reported something that cannot be."""


def hello_from_proto(message: fleet_pb2.Hello) -> NodeHello:
    """A node's introduction.

    Raises:
        BadReportError: it lacks a name or claims impossible speeds.
    """
    if not message.node_id or not message.instance_id:
        raise BadReportError("Hello lacks node_id or instance_id")
    attributes = message.attributes
    power = None
    if attributes.HasField("idle_watts") and attributes.HasField("max_watts"):
        power = PowerProfile(
            _checked("idle_watts", attributes.idle_watts),
            _checked("max_watts", attributes.max_watts),
            _checked("transmit_watts", attributes.transmit_watts),
            _checked("receive_watts", attributes.receive_watts),
            is_estimate=attributes.power_source
            in (types_pb2.POWER_SOURCE_ESTIMATE, types_pb2.POWER_SOURCE_UNSPECIFIED),
        )
        if power.max_watts < power.idle_watts:
            raise BadReportError(f"max_watts cannot be {power.max_watts}, less than when idle")
    return NodeHello(
        NodeId(message.node_id),
        message.instance_id,
        NodeAttributes(
            NodeKind.CLOUD if attributes.kind == types_pb2.NODE_KIND_CLOUD else NodeKind.EDGE,
            attributes.hardware,
            attributes.cpu_cores,
            attributes.memory_bytes,
            attributes.operating_system,
            attributes.agent_version,
            attributes.engine_version,
            power,
        ),
        models_from_proto(message.models),
    )


def models_from_proto(
    messages: Iterable[fleet_pb2.ModelState],
) -> tuple[ReportedModel, ...]:
    """A node's models.

    Raises:
        BadReportError: a speed, price or size that cannot be.
    """
    return tuple(_model_from_proto(message) for message in messages)


def _model_from_proto(message: fleet_pb2.ModelState) -> ReportedModel:
    if not message.name:
        raise BadReportError("a model has no name")
    calibration = None
    if message.HasField("calibration"):
        speeds = message.calibration
        decode = _checked("decode_tokens_per_second", speeds.decode_tokens_per_second, above=True)
        calibration = Calibration(
            _checked("prefill_tokens_per_second", speeds.prefill_tokens_per_second, above=True),
            decode,
            max(
                decode,
                _checked(
                    "saturated_decode_tokens_per_second",
                    speeds.saturated_decode_tokens_per_second,
                    above=True,
                ),
            ),
            min(_checked("utilisation_ratio", speeds.utilisation_ratio), 1.0),
        )
    return ReportedModel(
        name=ModelName(message.name),
        family=message.family,
        parameters_billions=_checked("parameters_billions", message.parameters_billions),
        quantisation=message.quantisation,
        digest=message.digest,
        phase=_PHASES.get(message.phase, ModelPhase.LOADING),
        issue=message.issue,
        context_tokens=message.context_tokens,
        slots=max(message.slots, 1),
        calibration=calibration,
        price=TokenPrice(
            _checked("prompt_usd_per_token", message.price.prompt_usd_per_token),
            _checked("completion_usd_per_token", message.price.completion_usd_per_token),
            _checked("request_usd", message.price.request_usd),
        ),
        has_chat_template=message.has_chat_template,
        characters_per_token=_checked(
            "characters_per_token", message.characters_per_token, above=True
        )
        if message.HasField("characters_per_token")
        else None,
        is_base_model=message.is_base_model,
    )


def _checked(name: str, value: float, above: bool = False) -> float:
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        raise BadReportError(f"{name} cannot be {value}")
    return value


def model_to_proto(model: ReportedModel) -> fleet_pb2.ModelState:
    """A model as operators see it."""
    message = fleet_pb2.ModelState(
        name=model.name,
        family=model.family,
        parameters_billions=model.parameters_billions,
        quantisation=model.quantisation,
        digest=model.digest,
        phase=_PHASES_OUT[model.phase],
        issue=model.issue,
        context_tokens=model.context_tokens,
        slots=model.slots,
        price=fleet_pb2.TokenPrice(
            prompt_usd_per_token=model.price.prompt_usd_per_token,
            completion_usd_per_token=model.price.completion_usd_per_token,
            request_usd=model.price.request_usd,
        ),
        has_chat_template=model.has_chat_template,
        characters_per_token=model.characters_per_token,
        is_base_model=model.is_base_model,
    )
    if model.calibration is not None:
        message.calibration.CopyFrom(
            fleet_pb2.Calibration(
                prefill_tokens_per_second=model.calibration.prefill_rate,
                decode_tokens_per_second=model.calibration.decode_rate,
                saturated_decode_tokens_per_second=model.calibration.saturated_decode_rate,
                utilisation_ratio=model.calibration.utilisation_ratio,
            )
        )
    return message


def attributes_to_proto(attributes: NodeAttributes) -> fleet_pb2.StaticAttributes:
    """A node's fixed attributes as operators see them."""
    message = fleet_pb2.StaticAttributes(
        kind=types_pb2.NODE_KIND_CLOUD
        if attributes.kind is NodeKind.CLOUD
        else types_pb2.NODE_KIND_EDGE,
        hardware=attributes.hardware,
        cpu_cores=attributes.cpu_cores,
        memory_bytes=attributes.memory_bytes,
        operating_system=attributes.operating_system,
        agent_version=attributes.agent_version,
        engine_version=attributes.engine_version,
    )
    if attributes.power is not None:
        message.idle_watts = attributes.power.idle_watts
        message.max_watts = attributes.power.max_watts
        message.transmit_watts = attributes.power.transmit_watts
        message.receive_watts = attributes.power.receive_watts
        if attributes.power.is_estimate:
            message.power_source = types_pb2.POWER_SOURCE_ESTIMATE
    return message


def health_from_proto(message: fleet_pb2.HealthSample) -> Health:
    """One health sample; its own time is not used."""
    return Health(
        uptime_seconds=message.uptime_seconds,
        cpu_utilisation_ratio=min(max(message.cpu_utilisation_ratio, 0.0), 1.0),
        memory_available_bytes=message.memory_available_bytes,
        temperature_celsius=message.temperature_celsius
        if message.HasField("temperature_celsius")
        else None,
        power_watts=message.power_watts if message.HasField("power_watts") else None,
        power_source=_POWER_SOURCES.get(message.power_source, "none"),
        is_throttled=message.is_throttled if message.HasField("is_throttled") else None,
        busy_slots=tuple((ModelName(load.name), load.busy_slots) for load in message.loads),
        issues=tuple(message.issues),
    )


def health_to_proto(health: Health) -> fleet_pb2.HealthSample:
    """A health sample as operators see it."""
    return fleet_pb2.HealthSample(
        uptime_seconds=health.uptime_seconds,
        cpu_utilisation_ratio=health.cpu_utilisation_ratio,
        memory_available_bytes=health.memory_available_bytes,
        temperature_celsius=health.temperature_celsius,
        power_watts=health.power_watts,
        power_source=_POWER_SOURCES_OUT[health.power_source],
        is_throttled=health.is_throttled,
        loads=[
            fleet_pb2.ModelLoad(name=name, busy_slots=slots) for name, slots in health.busy_slots
        ],
        issues=health.issues,
    )


def usage_from_proto(message: types_pb2.Usage) -> Usage:
    """What a request cost."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        queue_seconds=message.queue_seconds,
        prefill_seconds=message.prefill_seconds,
        decode_seconds=message.decode_seconds,
        energy_joules=message.energy_joules if message.HasField("energy_joules") else None,
        energy_source=_POWER_SOURCES.get(message.energy_source, "none"),
    )


def usage_to_proto(usage: Usage) -> types_pb2.Usage:
    """What a request cost, for the client."""
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        queue_seconds=usage.queue_seconds,
        prefill_seconds=usage.prefill_seconds,
        decode_seconds=usage.decode_seconds,
        energy_joules=usage.energy_joules,
        energy_source=_POWER_SOURCES_OUT[usage.energy_source],
    )


def finish_reason_to_proto(reason: FinishReason) -> types_pb2.FinishReason.ValueType:
    """How a generation ended."""
    return _REASONS_OUT[reason]


def completion_from_proto(message: fleet_pb2.Completion) -> Completion:
    """A node's last word on a work order; an unknown reason counts as a failure."""
    reason = _REASONS.get(message.finish_reason, FinishReason.FAILED)
    failure = None
    if reason is FinishReason.FAILED:
        failure = _FAILURES.get(message.failure.kind, FailureKind.INTERNAL)
    return Completion(reason, usage_from_proto(message.usage), failure, message.failure.message)


def sampling_to_proto(sampling: Sampling) -> types_pb2.SamplingParameters:
    """Sampling with every default filled in, so that agents need not know them."""
    return types_pb2.SamplingParameters(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=sampling.stop,
    )


def work_order(
    request: InferenceRequest, attempt: int, model: ModelName, time_limit_seconds: float
) -> fleet_pb2.WorkOrder:
    """The order that sends a request to a node."""
    order = fleet_pb2.WorkOrder(
        request_id=request.request_id,
        attempt=attempt,
        model=model,
        sampling=sampling_to_proto(request.sampling),
        time_limit_seconds=time_limit_seconds,
    )
    if isinstance(request.prompt, str):
        order.prompt = request.prompt
    else:
        order.chat.messages.extend(
            types_pb2.ChatMessage(role=message.role, content=message.content)
            for message in request.prompt
        )
    return order
