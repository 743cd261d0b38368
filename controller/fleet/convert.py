"""Between pointsman.v1 fleet messages and the domain."""

import math
from collections.abc import Iterable
from typing import Final

from typing_extensions import assert_never

from controller.domain.cluster import Calibration, NodeKind, PowerProfile, TokenPrice
from controller.domain.completion import Completion, FailureKind, FinishReason, Usage
from controller.domain.node_report import (
    Health,
    ModelPhase,
    NodeAttributes,
    NodeHello,
    ReportedModel,
    SensorState,
)
from controller.domain.order import (
    ManageModel,
    MeasureSpeed,
    ModelAction,
    Order,
    OrderPhase,
    OrderUpdate,
)
from controller.domain.request import FormatKind, InferenceRequest, ResponseFormat, Sampling
from controller.ids import ModelName, NodeId
from pointsman.v1 import fleet_pb2, types_pb2

_PHASES = {
    fleet_pb2.MODEL_PHASE_LOADING: ModelPhase.LOADING,
    fleet_pb2.MODEL_PHASE_READY: ModelPhase.READY,
    fleet_pb2.MODEL_PHASE_FAILED: ModelPhase.FAILED,
    fleet_pb2.MODEL_PHASE_UNLOADED: ModelPhase.UNLOADED,
    fleet_pb2.MODEL_PHASE_DOWNLOADING: ModelPhase.DOWNLOADING,
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

_ESTIMATE: Final = "estimate"
_LONGEST_SOURCE: Final = 40
_MOST_SENSORS: Final = 32
"""What a node says of its sensors is shown to operators; nobody has this many."""


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
            attributes.is_link_metered,
            _checked("receive_usd_per_gigabyte", attributes.receive_usd_per_gigabyte) / 1e9,
            _checked("transmit_usd_per_gigabyte", attributes.transmit_usd_per_gigabyte) / 1e9,
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
        calibration = _calibration_from_proto(message.calibration)
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
        refuses_raw_prompts=message.refuses_raw_prompts,
        is_pinned=message.is_pinned,
        progress_ratio=min(_checked("progress_ratio", message.progress_ratio), 1.0)
        if message.HasField("progress_ratio")
        else None,
        resident_bytes=message.resident_bytes if message.HasField("resident_bytes") else None,
        supports_response_format=message.supports_response_format,
    )


def _calibration_from_proto(speeds: fleet_pb2.Calibration) -> Calibration:
    decode = _checked("decode_tokens_per_second", speeds.decode_tokens_per_second, above=True)
    saturated = _checked(
        "saturated_decode_tokens_per_second", speeds.saturated_decode_tokens_per_second, above=True
    )

    def optional(name: str) -> float | None:
        return _checked(name, getattr(speeds, name)) if speeds.HasField(name) else None  # type: ignore[arg-type]

    return Calibration(
        prefill_rate=_checked(
            "prefill_tokens_per_second", speeds.prefill_tokens_per_second, above=True
        ),
        decode_rate=decode,
        saturated_decode_rate=max(decode, saturated),
        utilisation_ratio=min(_checked("utilisation_ratio", speeds.utilisation_ratio), 1.0),
        measured_slots=max(speeds.measured_slots, 0),
        load_watts=optional("load_watts"),
        engine_version=speeds.engine_version,
        power_mode=speeds.power_mode,
        prefill_joules_per_token=optional("prefill_joules_per_token"),
        decode_joules_per_token=optional("decode_joules_per_token"),
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
        refuses_raw_prompts=model.refuses_raw_prompts,
        is_pinned=model.is_pinned,
        progress_ratio=model.progress_ratio,
        resident_bytes=model.resident_bytes,
        supports_response_format=model.supports_response_format,
    )
    if model.calibration is not None:
        message.calibration.CopyFrom(_calibration_to_proto(model.calibration))
    return message


def _calibration_to_proto(speeds: Calibration) -> fleet_pb2.Calibration:
    return fleet_pb2.Calibration(
        prefill_tokens_per_second=speeds.prefill_rate,
        decode_tokens_per_second=speeds.decode_rate,
        saturated_decode_tokens_per_second=speeds.saturated_decode_rate,
        utilisation_ratio=speeds.utilisation_ratio,
        load_watts=speeds.load_watts,
        measured_slots=speeds.measured_slots,
        engine_version=speeds.engine_version,
        power_mode=speeds.power_mode,
        prefill_joules_per_token=speeds.prefill_joules_per_token,
        decode_joules_per_token=speeds.decode_joules_per_token,
    )


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
        is_link_metered=attributes.is_link_metered,
    )
    if attributes.receive_usd_per_byte:
        message.receive_usd_per_gigabyte = 1e9 * attributes.receive_usd_per_byte
    if attributes.transmit_usd_per_byte:
        message.transmit_usd_per_gigabyte = 1e9 * attributes.transmit_usd_per_byte
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
        power_source=power_source_name(
            message.power_source, message.power_source_name, message.is_power_estimate
        ),
        is_throttled=message.is_throttled if message.HasField("is_throttled") else None,
        issues=tuple(message.issues),
        power_mode=message.power_mode,
        gpu_utilisation_ratio=min(max(message.gpu_utilisation_ratio, 0.0), 1.0)
        if message.HasField("gpu_utilisation_ratio")
        else None,
        energy_today_joules=message.energy_today_joules
        if message.HasField("energy_today_joules")
        else None,
        sensors=tuple(
            SensorState(sensor.name[:_LONGEST_SOURCE], sensor.is_working, sensor.read_seconds)
            for sensor in message.sensors[:_MOST_SENSORS]
        ),
    )


def power_source_name(source: types_pb2.PowerSource.ValueType, name: str, is_estimate: bool) -> str:
    """Where watts or joules came from: a sensor's name, "estimate" or "none".

    Args:
        source: all that an agent or a controller sends which knows no names.
        name: empty in what it sends.
    """
    if is_estimate:
        return _ESTIMATE
    if name:
        return name[:_LONGEST_SOURCE]
    if source == types_pb2.POWER_SOURCE_UNSPECIFIED:
        return "none"
    try:
        return types_pb2.PowerSource.Name(source).removeprefix("POWER_SOURCE_").lower()
    except ValueError:  # a newer sender's
        return "none"


def power_source_to_proto(name: str) -> types_pb2.PowerSource.ValueType:
    """The value for receivers that know no names; SENSOR for a sensor without one."""
    try:
        return types_pb2.PowerSource.Value(f"POWER_SOURCE_{name.upper()}")
    except ValueError:
        return types_pb2.POWER_SOURCE_SENSOR


def health_to_proto(health: Health) -> fleet_pb2.HealthSample:
    """A health sample as operators see it."""
    return fleet_pb2.HealthSample(
        uptime_seconds=health.uptime_seconds,
        cpu_utilisation_ratio=health.cpu_utilisation_ratio,
        memory_available_bytes=health.memory_available_bytes,
        temperature_celsius=health.temperature_celsius,
        power_watts=health.power_watts,
        power_source=power_source_to_proto(health.power_source),
        power_source_name=health.power_source,
        is_power_estimate=health.power_source == _ESTIMATE,
        is_throttled=health.is_throttled,
        sensors=[
            fleet_pb2.SensorState(
                name=sensor.name, is_working=sensor.is_working, read_seconds=sensor.read_seconds
            )
            for sensor in health.sensors
        ],
        issues=health.issues,
        power_mode=health.power_mode,
        gpu_utilisation_ratio=health.gpu_utilisation_ratio,
        energy_today_joules=health.energy_today_joules,
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
        energy_source=power_source_name(
            message.energy_source, message.energy_source_name, message.is_energy_estimate
        ),
        prefill_joules=message.prefill_joules if message.HasField("prefill_joules") else None,
        decode_joules=message.decode_joules if message.HasField("decode_joules") else None,
        cached_prompt_tokens=min(max(message.cached_prompt_tokens, 0), message.prompt_tokens),
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
        energy_source=power_source_to_proto(usage.energy_source),
        energy_source_name=usage.energy_source,
        is_energy_estimate=usage.energy_source == _ESTIMATE,
        prefill_joules=usage.prefill_joules,
        decode_joules=usage.decode_joules,
        cached_prompt_tokens=usage.cached_prompt_tokens,
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


def response_format_to_proto(given: ResponseFormat | None) -> types_pb2.ResponseFormat | None:
    """What an answer must look like; None for free text."""
    if given is None:
        return None
    if given.kind is FormatKind.JSON_OBJECT:
        return types_pb2.ResponseFormat(json_object=True)
    if given.kind is FormatKind.JSON_SCHEMA:
        return types_pb2.ResponseFormat(json_schema=given.text)
    return types_pb2.ResponseFormat(grammar=given.text)


_ORDER_PHASES = {
    fleet_pb2.ORDER_PHASE_RUNNING: OrderPhase.RUNNING,
    fleet_pb2.ORDER_PHASE_DONE: OrderPhase.DONE,
    fleet_pb2.ORDER_PHASE_FAILED: OrderPhase.FAILED,
}
_ORDER_PHASES_OUT = {phase: value for value, phase in _ORDER_PHASES.items()}

_ACTIONS = {
    fleet_pb2.MODEL_ACTION_LOAD: ModelAction.LOAD,
    fleet_pb2.MODEL_ACTION_UNLOAD: ModelAction.UNLOAD,
    fleet_pb2.MODEL_ACTION_PIN: ModelAction.PIN,
    fleet_pb2.MODEL_ACTION_UNPIN: ModelAction.UNPIN,
}
_ACTIONS_OUT = {action: value for value, action in _ACTIONS.items()}


def action_from_proto(value: fleet_pb2.ModelAction.ValueType) -> ModelAction | None:
    """What is done with a model; None for an action that this controller does not know."""
    return _ACTIONS.get(value)


def order_to_proto(order_id: str, order: Order) -> fleet_pb2.ConnectResponse:
    """An order as it goes down the node's stream."""
    match order:
        case ManageModel(action, model, slots, context_tokens):
            return fleet_pb2.ConnectResponse(
                model_order=fleet_pb2.ModelOrder(
                    order_id=order_id,
                    action=_ACTIONS_OUT[action],
                    model=model,
                    slots=slots,
                    context_tokens=context_tokens,
                )
            )
        case MeasureSpeed(model):
            return fleet_pb2.ConnectResponse(
                calibrate=fleet_pb2.CalibrateOrder(order_id=order_id, model=model or "")
            )
        case _:
            assert_never(order)


def order_update_from_proto(message: fleet_pb2.OrderUpdate) -> OrderUpdate:
    """How an order goes; an unknown phase counts as running."""
    ratio = message.progress_ratio if message.HasField("progress_ratio") else None
    return OrderUpdate(
        message.order_id,
        _ORDER_PHASES.get(message.phase, OrderPhase.RUNNING),
        message.message,
        ratio if ratio is not None and 0.0 <= ratio <= 1.0 else None,
    )


def order_update_to_proto(update: OrderUpdate) -> fleet_pb2.OrderUpdate:
    """How an order goes, for operators."""
    return fleet_pb2.OrderUpdate(
        order_id=update.order_id,
        phase=_ORDER_PHASES_OUT[update.phase],
        message=update.message,
        progress_ratio=update.progress_ratio,
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
        response_format=response_format_to_proto(request.response_format),
        session_id=request.session_id,
    )
    if isinstance(request.prompt, str):
        order.prompt = request.prompt
    else:
        order.chat.messages.extend(
            types_pb2.ChatMessage(role=message.role, content=message.content)
            for message in request.prompt
        )
    return order
