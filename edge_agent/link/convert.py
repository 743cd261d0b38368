"""Between pointsman.v1 and the agent's own values."""

from edge_agent.engine.base import FormatKind, Message, ResponseFormat, Sampling
from edge_agent.identity import HostDescription
from edge_agent.lifecycle import ModelPhase
from edge_agent.sensors.base import ESTIMATE, HostSample
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.sampler import PowerState
from edge_agent.serving.completion import Completion, FailureKind, Outcome
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.orders import Action, ModelOrder, OrderPhase, OrderUpdate
from edge_agent.serving.work import WorkOrder
from pointsman.v1 import fleet_pb2, types_pb2

_PHASES = {
    ModelPhase.LOADING: fleet_pb2.MODEL_PHASE_LOADING,
    ModelPhase.READY: fleet_pb2.MODEL_PHASE_READY,
    ModelPhase.FAILED: fleet_pb2.MODEL_PHASE_FAILED,
    ModelPhase.UNLOADED: fleet_pb2.MODEL_PHASE_UNLOADED,
    ModelPhase.DOWNLOADING: fleet_pb2.MODEL_PHASE_DOWNLOADING,
}

_ACTIONS = {
    fleet_pb2.MODEL_ACTION_LOAD: Action.LOAD,
    fleet_pb2.MODEL_ACTION_UNLOAD: Action.UNLOAD,
    fleet_pb2.MODEL_ACTION_PIN: Action.PIN,
    fleet_pb2.MODEL_ACTION_UNPIN: Action.UNPIN,
}

_ORDER_PHASES = {
    OrderPhase.RUNNING: fleet_pb2.ORDER_PHASE_RUNNING,
    OrderPhase.DONE: fleet_pb2.ORDER_PHASE_DONE,
    OrderPhase.FAILED: fleet_pb2.ORDER_PHASE_FAILED,
}

_OUTCOMES = {
    Outcome.STOP: types_pb2.FINISH_REASON_STOP,
    Outcome.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Outcome.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    Outcome.FAILED: types_pb2.FINISH_REASON_FAILED,
}

_FAILURES = {
    FailureKind.MODEL_NOT_LOADED: fleet_pb2.WORK_FAILURE_KIND_MODEL_NOT_LOADED,
    FailureKind.DRAINING: fleet_pb2.WORK_FAILURE_KIND_DRAINING,
    FailureKind.QUEUE_FULL: fleet_pb2.WORK_FAILURE_KIND_QUEUE_FULL,
    FailureKind.INVALID_REQUEST: fleet_pb2.WORK_FAILURE_KIND_INVALID_REQUEST,
    FailureKind.CONTEXT_EXCEEDED: fleet_pb2.WORK_FAILURE_KIND_CONTEXT_EXCEEDED,
    FailureKind.ENGINE_CRASHED: fleet_pb2.WORK_FAILURE_KIND_ENGINE_CRASHED,
    FailureKind.TIME_LIMIT: fleet_pb2.WORK_FAILURE_KIND_TIME_LIMIT,
    FailureKind.INTERNAL: fleet_pb2.WORK_FAILURE_KIND_INTERNAL,
}


def attributes_to_proto(
    host: HostDescription,
    kind: str,
    agent_version: str,
    engine_version: str,
    power: PowerModel | None,
    transmit_watts: float | None,
    receive_watts: float | None,
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
        speeds = model.speeds
        message.calibration.CopyFrom(
            fleet_pb2.Calibration(
                prefill_tokens_per_second=speeds.prefill_rate,
                decode_tokens_per_second=speeds.decode_rate,
                saturated_decode_tokens_per_second=speeds.saturated_decode_rate,
                utilisation_ratio=1.0,
                load_watts=speeds.load_watts,
                measured_slots=speeds.measured_slots,
                engine_version=speeds.engine_version,
                power_mode=speeds.power_mode,
                prefill_joules_per_token=speeds.prefill_joules_per_token,
                decode_joules_per_token=speeds.decode_joules_per_token,
            )
        )
    return message


def health_to_proto(
    sample: HostSample,
    power: PowerModel | None,
    issues: list[str],
    measured: PowerState | None = None,
    power_mode: str = "",
    gpu_utilisation_ratio: float | None = None,
    energy_today_joules: float | None = None,
) -> fleet_pb2.HealthSample:
    """One health sample.

    Args:
        power: the board's model, whose power at this utilisation is sent, and said to be an
            estimate, while no sensor works.
        measured: what the sensors say.
        power_mode: of the board; empty where it has none.
        energy_today_joules: since local midnight; None when nobody knows.
    """
    message = fleet_pb2.HealthSample(
        uptime_seconds=sample.uptime_seconds,
        cpu_utilisation_ratio=sample.cpu_utilisation_ratio,
        memory_available_bytes=sample.memory_available_bytes,
        temperature_celsius=sample.temperature_celsius,
        power_source=types_pb2.POWER_SOURCE_NONE,
        is_throttled=sample.is_throttled,
        issues=issues,
        power_mode=power_mode,
        gpu_utilisation_ratio=gpu_utilisation_ratio,
        energy_today_joules=energy_today_joules,
    )
    message.sample_time.GetCurrentTime()
    source = None
    if measured is not None and measured.source is not None and measured.power_watts is not None:
        message.power_watts, source = measured.power_watts, measured.source
    elif power is not None:
        message.power_watts, source = power.watts(sample.cpu_utilisation_ratio), ESTIMATE
    if source is not None:
        message.power_source = power_source_to_proto(source)
        message.power_source_name = source
        message.is_power_estimate = source == ESTIMATE
    return message


def power_source_to_proto(source: str) -> types_pb2.PowerSource.ValueType:
    """The value that receivers know which are older than names; SENSOR for a newer sensor."""
    try:
        return types_pb2.PowerSource.Value(f"POWER_SOURCE_{source.upper()}")
    except ValueError:
        return types_pb2.POWER_SOURCE_SENSOR


def order_from_proto(message: fleet_pb2.WorkOrder) -> WorkOrder:
    """A work order; the controller fills in every sampling default."""
    given, defaults = message.sampling, Sampling()
    prompt: str | tuple[Message, ...] = message.prompt
    if message.WhichOneof("input") == "chat":
        prompt = tuple(Message(turn.role, turn.content) for turn in message.chat.messages)
    return WorkOrder(
        request_id=message.request_id,
        attempt=message.attempt,
        model=message.model,
        prompt=prompt,
        sampling=Sampling(
            max_tokens=given.max_tokens if given.HasField("max_tokens") else defaults.max_tokens,
            temperature=given.temperature
            if given.HasField("temperature")
            else defaults.temperature,
            top_p=given.top_p if given.HasField("top_p") else defaults.top_p,
            top_k=given.top_k if given.HasField("top_k") else defaults.top_k,
            seed=given.seed if given.HasField("seed") else None,
            stop=tuple(given.stop),
        ),
        time_limit_seconds=message.time_limit_seconds or 900.0,
        response_format=_response_format(message.response_format),
        session_id=message.session_id,
    )


def _response_format(message: types_pb2.ResponseFormat) -> ResponseFormat | None:
    match message.WhichOneof("format"):
        case "json_object":
            return ResponseFormat(FormatKind.JSON_OBJECT) if message.json_object else None
        case "json_schema":
            return ResponseFormat(FormatKind.JSON_SCHEMA, message.json_schema)
        case "grammar":
            return ResponseFormat(FormatKind.GRAMMAR, message.grammar)
        case _:
            return None


def model_order_from_proto(message: fleet_pb2.ModelOrder) -> ModelOrder | None:
    """An order about a model; None for an action that this agent does not know."""
    action = _ACTIONS.get(message.action)
    if action is None:
        return None
    return ModelOrder(
        message.order_id,
        action,
        message.model,
        message.slots if message.HasField("slots") else None,
        message.context_tokens if message.HasField("context_tokens") else None,
    )


def calibrate_order_from_proto(message: fleet_pb2.CalibrateOrder) -> ModelOrder:
    """An order to measure one model's speed again, or every loaded one's."""
    return ModelOrder(message.order_id, Action.MEASURE, message.model)


def order_update_to_proto(update: OrderUpdate) -> fleet_pb2.OrderUpdate:
    """How an order goes."""
    return fleet_pb2.OrderUpdate(
        order_id=update.order_id,
        phase=_ORDER_PHASES[update.phase],
        message=update.message,
        progress_ratio=update.progress_ratio,
    )


def completion_to_proto(completion: Completion) -> fleet_pb2.Completion:
    """The end of a work order."""
    source = None
    if completion.energy_joules is not None:
        source = completion.energy_source or ESTIMATE
    message = fleet_pb2.Completion(
        request_id=completion.request_id,
        attempt=completion.attempt,
        model=completion.model,
        finish_reason=_OUTCOMES[completion.outcome],
        usage=types_pb2.Usage(
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            queue_seconds=completion.queue_seconds,
            prefill_seconds=completion.prefill_seconds,
            decode_seconds=completion.decode_seconds,
            energy_joules=completion.energy_joules,
            energy_source=power_source_to_proto(source or "none"),
            energy_source_name=source or "none",
            is_energy_estimate=source == ESTIMATE,
            prefill_joules=completion.prefill_joules,
            decode_joules=completion.decode_joules,
            cached_prompt_tokens=completion.cached_prompt_tokens,
        ),
    )
    if completion.failure is not None:
        message.failure.kind = _FAILURES[completion.failure]
        message.failure.message = completion.message
    return message
