"""Between pointsman.v1 fleet messages and the domain; `Codec` walks what has one name on both."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Final

from controller.domain.cluster import Calibration, NodeKind, PowerProfile, TokenPrice
from controller.domain.completion import Completion, FailureKind, FinishReason
from controller.domain.node_report import (
    Health,
    ModelPhase,
    NodeAttributes,
    NodeHello,
    ReportedModel,
    SensorState,
)
from controller.domain.request import (
    ChatMessage,
    InferenceRequest,
)
from controller.ids import ModelName, NodeId
from pointsman.codec import Check, Codec
from pointsman.convert import (
    ESTIMATE,
    FAILURES,
    FINISH_REASONS,
    LONGEST_SOURCE,
    SAMPLING,
    USAGE,
    response_format_to_proto,
    source_name,
    source_number,
)
from pointsman.v1 import fleet_pb2, types_pb2

_MOST_SENSORS: Final = 32
"""What a node says of its sensors is shown to operators; nobody has this many."""


class BadReportError(ValueError):
    """A node reported something that cannot be."""


def _figure(name: str, value: float, above: bool = False) -> float:
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        raise BadReportError(f"{name} cannot be {value}")
    return value


def _figures(*names: str, above: bool = False) -> Mapping[str, Check]:
    """Checks that these are numbers, not below 0 or, with `above`, all above it."""
    return {name: partial(_figure, name, above=above) for name in names}


def _ratio(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _named(name: str) -> ModelName:
    if not name:
        raise BadReportError("a model has no name")
    return ModelName(name)


def _power_profile(message: fleet_pb2.StaticAttributes) -> PowerProfile | None:
    if not (message.HasField("idle_watts") and message.HasField("max_watts")):
        return None
    power = PowerProfile(
        **{name: _figure(name, getattr(message, name)) for name in _WATTS},
        is_estimate=message.power_source
        in (types_pb2.POWER_SOURCE_ESTIMATE, types_pb2.POWER_SOURCE_UNSPECIFIED),
    )
    if power.max_watts < power.idle_watts:
        raise BadReportError(f"max_watts cannot be {power.max_watts}, less than when idle")
    return power


def _watts(name: str, node: NodeAttributes) -> float | None:
    watts: float | None = getattr(node.power, name, None)
    return watts


def _usd_per_byte(name: str, message: fleet_pb2.StaticAttributes) -> float:
    return _figure(name, getattr(message, name)) / 1e9


_WATTS: Final = ("idle_watts", "max_watts", "transmit_watts", "receive_watts")

ATTRIBUTES = Codec(
    NodeAttributes,
    fleet_pb2.StaticAttributes,
    unknown=[NodeKind.EDGE],
    read_with={
        "power": _power_profile,
        "receive_usd_per_byte": partial(_usd_per_byte, "receive_usd_per_gigabyte"),
        "transmit_usd_per_byte": partial(_usd_per_byte, "transmit_usd_per_gigabyte"),
    },
    write_with={
        **{name: partial(_watts, name) for name in _WATTS},
        "power_source": lambda node: (
            types_pb2.POWER_SOURCE_ESTIMATE if node.power and node.power.is_estimate else None
        ),
        "receive_usd_per_gigabyte": lambda node: 1e9 * node.receive_usd_per_byte or None,
        "transmit_usd_per_gigabyte": lambda node: 1e9 * node.transmit_usd_per_byte or None,
    },
)

_SPEEDS: Final = (
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "saturated_decode_tokens_per_second",
)

_CALIBRATION = Codec(
    Calibration,
    fleet_pb2.Calibration,
    checks={
        **_figures(*_SPEEDS, above=True),
        **_figures("load_watts", "prefill_joules_per_token", "decode_joules_per_token"),
        "utilisation_ratio": lambda ratio: min(_figure("utilisation_ratio", ratio), 1.0),
        "measured_slots": lambda slots: max(slots, 0),
    },
)


def _coherent(speeds: Calibration) -> Calibration:
    """All slots together are at least as fast as one."""
    together = max(speeds.decode_tokens_per_second, speeds.saturated_decode_tokens_per_second)
    return replace(speeds, saturated_decode_tokens_per_second=together)


_PRICE = Codec(
    TokenPrice,
    fleet_pb2.TokenPrice,
    checks=_figures("prompt_usd_per_token", "completion_usd_per_token", "request_usd"),
)

MODEL = Codec(
    ReportedModel,
    fleet_pb2.ModelState,
    nested=[_CALIBRATION, _PRICE],
    unknown=[ModelPhase.LOADING],
    checks={
        **_figures("parameters_billions"),
        **_figures("characters_per_token", above=True),
        "name": _named,
        "slots": lambda slots: max(slots, 1),
        "calibration": _coherent,
        "progress_ratio": lambda ratio: min(_figure("progress_ratio", ratio), 1.0),
    },
)
"""Reading raises `BadReportError` for a speed, price or size that cannot be."""

HEALTH = Codec(
    Health,
    fleet_pb2.HealthSample,
    by_hand=["sample_time"],  # boards without a clock battery jump after boot
    checks={
        "cpu_utilisation_ratio": _ratio,
        "gpu_utilisation_ratio": _ratio,
        "sensors": lambda sensors: sensors[:_MOST_SENSORS],
    },
    nested=[
        Codec(
            SensorState,
            fleet_pb2.SensorState,
            checks={"name": lambda name: name[:LONGEST_SOURCE]},
        )
    ],
    read_with={
        "power_source": lambda sample: source_name(
            sample.power_source, sample.power_source_name, sample.is_power_estimate
        )
    },
    write_with={
        "power_source": lambda health: source_number(health.power_source),
        "power_source_name": attrgetter("power_source"),
        "is_power_estimate": lambda health: health.power_source == ESTIMATE,
    },
)

_FAILURES: Final[dict[int, FailureKind]] = {number: kind for kind, number in FAILURES.items()}
_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}


def _failure(message: fleet_pb2.Completion) -> FailureKind | None:
    if _REASONS.get(message.finish_reason, FinishReason.FAILED) is not FinishReason.FAILED:
        return None
    return _FAILURES.get(message.failure.kind, FailureKind.INTERNAL)


COMPLETION = Codec(
    Completion,
    fleet_pb2.Completion,
    nested=[USAGE],
    renamed={"reason": "finish_reason"},
    by_hand=["request_id", "attempt", "model", "failure", "message"],
    read_with={"failure": _failure, "message": attrgetter("failure.message")},
    unknown=[FinishReason.FAILED],
)
"""An unknown reason counts as a failure."""

_TURN = Codec(ChatMessage, types_pb2.ChatMessage)


def hello_from_proto(message: fleet_pb2.Hello) -> NodeHello:
    """A node's introduction.

    Raises:
        BadReportError: it lacks a name or claims impossible speeds.
    """
    if not message.node_id or not message.instance_id:
        raise BadReportError("Hello lacks node_id or instance_id")
    return NodeHello(
        NodeId(message.node_id),
        message.instance_id,
        ATTRIBUTES.read(message.attributes),
        models_from_proto(message.models),
    )


def models_from_proto(messages: Iterable[fleet_pb2.ModelState]) -> tuple[ReportedModel, ...]:
    """A node's models.

    Raises:
        BadReportError: a speed, price or size that cannot be.
    """
    return tuple(MODEL.read(message) for message in messages)


def work_order(
    request: InferenceRequest, attempt: int, model: ModelName, time_limit_seconds: float
) -> fleet_pb2.WorkOrder:
    """The order that sends a request to a node, with every default filled in."""
    order = fleet_pb2.WorkOrder(
        request_id=request.request_id,
        attempt=attempt,
        model=model,
        sampling=SAMPLING.write(request.sampling),
        time_limit_seconds=time_limit_seconds,
        response_format=response_format_to_proto(request.response_format),
        session_id=request.session_id,
    )
    if isinstance(request.prompt, str):
        order.prompt = request.prompt
    else:
        order.chat.messages.extend(map(_TURN.write, request.prompt))
    return order
