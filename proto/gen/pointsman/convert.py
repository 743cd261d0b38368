"""Between messages of pointsman.v1 and the values that both programs share."""

from operator import attrgetter
from typing import Final

from google.protobuf.message_factory import GetMessageClass

from pointsman.codec import Codec, enum_to_wire
from pointsman.v1 import fleet_pb2, types_pb2
from pointsman.values import (
    ORDERS,
    FailureKind,
    FinishReason,
    FormatKind,
    Order,
    OrderPhase,
    OrderUpdate,
    ResponseFormat,
    Sampling,
    Usage,
)

ESTIMATE: Final = "estimate"
"""Where watts or joules come from that nobody measured."""

LONGEST_SOURCE: Final = 40

FINISH_REASONS: Final = enum_to_wire(FinishReason, types_pb2.FinishReason.DESCRIPTOR)
FAILURES: Final = enum_to_wire(FailureKind, fleet_pb2.WorkFailureKind.DESCRIPTOR)

SAMPLING: Final = Codec(Sampling, types_pb2.SamplingParameters)

ORDER_UPDATE: Final = Codec(
    OrderUpdate,
    fleet_pb2.OrderUpdate,
    unknown=[OrderPhase.RUNNING],
    checks={"progress_ratio": lambda ratio: ratio if 0.0 <= ratio <= 1.0 else None},
)


def source_name(source: types_pb2.PowerSource.ValueType, name: str, is_estimate: bool) -> str:
    """Where watts or joules came from: a sensor's name, "estimate" or "none".

    Args:
        source: all that an agent or a controller sends which knows no names.
        name: empty in what it sends.
    """
    if is_estimate:
        return ESTIMATE
    if name:
        return name[:LONGEST_SOURCE]
    if source == types_pb2.POWER_SOURCE_UNSPECIFIED:
        return "none"
    try:
        return types_pb2.PowerSource.Name(source).removeprefix("POWER_SOURCE_").lower()
    except ValueError:  # a newer sender's
        return "none"


def source_number(name: str) -> types_pb2.PowerSource.ValueType:
    """The value for receivers that know no names; SENSOR for a sensor without one."""
    try:
        return types_pb2.PowerSource.Value(f"POWER_SOURCE_{name.upper()}")
    except ValueError:
        return types_pb2.POWER_SOURCE_SENSOR


USAGE: Final = Codec(
    Usage,
    types_pb2.Usage,
    read_with={
        "energy_source": lambda usage: source_name(
            usage.energy_source, usage.energy_source_name, usage.is_energy_estimate
        ),
        "cached_prompt_tokens": lambda usage: min(
            max(usage.cached_prompt_tokens, 0), usage.prompt_tokens
        ),
    },
    write_with={
        "energy_source": lambda usage: source_number(usage.energy_source),
        "energy_source_name": attrgetter("energy_source"),
        "is_energy_estimate": lambda usage: usage.energy_source == ESTIMATE,
    },
)


def response_format_from_proto(message: types_pb2.ResponseFormat) -> ResponseFormat | None:
    """What an answer must look like; None for free text."""
    kind = message.WhichOneof("format")
    if kind is None or (kind == "json_object" and not message.json_object):
        return None
    text = "" if kind == "json_object" else getattr(message, kind)
    return ResponseFormat(FormatKind(kind), text)


def response_format_to_proto(given: ResponseFormat | None) -> types_pb2.ResponseFormat | None:
    """The message; None for free text."""
    if given is None:
        return None
    if given.kind is FormatKind.JSON_OBJECT:
        return types_pb2.ResponseFormat(json_object=True)
    return types_pb2.ResponseFormat(**{given.kind.value: given.text})


_ORDERS: Final = {
    name: Codec(
        kind,
        GetMessageClass(fleet_pb2.ConnectResponse.DESCRIPTOR.fields_by_name[name].message_type),
        by_hand=["order_id"],
    )
    for name, kind in ORDERS.items()
}
_ORDER_NAMES: Final = {kind: name for name, kind in ORDERS.items()}


def order_to_proto(order_id: str, order: Order) -> fleet_pb2.ConnectResponse:
    """An order as it goes down the node's stream."""
    name = _ORDER_NAMES[type(order)]
    return fleet_pb2.ConnectResponse(**{name: _ORDERS[name].write(order, order_id=order_id)})


def order_from_proto(message: fleet_pb2.ConnectResponse) -> tuple[str, Order | None] | None:
    """The order's id and the order; without the latter when it asks for what nobody here knows.

    Returns None for a message that is no order.
    """
    name = message.WhichOneof("message")
    if name not in _ORDERS:
        return None
    carried, order = getattr(message, name), _ORDERS[name].read(getattr(message, name))
    return carried.order_id, None if getattr(order, "action", order) is None else order
