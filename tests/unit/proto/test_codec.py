"""The table in `pointsman.codec` of what a field of a dataclass is in a message."""

import enum
from dataclasses import dataclass

import pytest

from pointsman.codec import Codec, enum_to_wire
from pointsman.v1 import admin_pb2, fleet_pb2, router_pb2, types_pb2


class Phase(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Update:
    order_id: str
    phase: Phase | None
    message: str
    progress_ratio: float | None


@dataclass(frozen=True)
class Part:
    name: str
    is_working: bool = False
    read_seconds: float = 0.0


UPDATE = Codec(Update, fleet_pb2.OrderUpdate)


@pytest.mark.parametrize("ratio", [None, 0.0, 0.5])
def test_absent_is_none_and_zero_is_zero(ratio: float | None) -> None:
    update = Update("o", Phase.DONE, "", ratio)
    message = UPDATE.write(update)
    assert message.HasField("progress_ratio") is (ratio is not None)
    assert UPDATE.read(message) == update


def test_field_that_only_the_message_has_is_told_by_its_name() -> None:
    @dataclass
    class Short:
        order_id: str

    with pytest.raises(TypeError, match=r"Short lacks .*'phase'.* of OrderUpdate"):
        Codec(Short, fleet_pb2.OrderUpdate)


def test_field_that_only_the_dataclass_has_is_told_by_its_name() -> None:
    @dataclass
    class Long:
        name: str
        is_working: bool
        read_seconds: float
        colour: str

    with pytest.raises(TypeError, match=r"SensorState lacks \['colour'\] of Long"):
        Codec(Long, fleet_pb2.SensorState)


def test_enum_whose_members_are_not_those_of_the_wire_is_refused() -> None:
    class Fewer(enum.Enum):
        RUNNING = "running"

    with pytest.raises(TypeError, match=r"only one has \['done', 'failed'\]"):
        enum_to_wire(Fewer, fleet_pb2.OrderPhase.DESCRIPTOR)


def test_unknown_enum_value_is_none_or_what_the_codec_was_given_for_it() -> None:
    newer = fleet_pb2.OrderUpdate(phase=99)  # type: ignore[arg-type]
    assert UPDATE.read(newer).phase is None
    lenient = Codec(Update, fleet_pb2.OrderUpdate, unknown=[Phase.RUNNING])
    assert lenient.read(newer).phase is Phase.RUNNING
    assert lenient.read(fleet_pb2.OrderUpdate()).phase is Phase.RUNNING


def test_absent_field_with_a_default_takes_it() -> None:
    @dataclass(frozen=True)
    class Sampling:
        max_tokens: int = 256
        temperature: float = 0.7
        top_p: float = 0.95
        top_k: int = 40
        seed: int | None = None
        stop: tuple[str, ...] = ()

    codec = Codec(Sampling, types_pb2.SamplingParameters)
    assert codec.read(types_pb2.SamplingParameters(top_k=0)) == Sampling(top_k=0)
    assert codec.write(Sampling()).HasField("max_tokens")


def test_empty_text_stands_for_none_where_the_field_is_always_there() -> None:
    @dataclass(frozen=True)
    class Order:
        model: str | None

    codec = Codec(Order, fleet_pb2.CalibrateOrder, by_hand=["order_id"])
    assert codec.read(fleet_pb2.CalibrateOrder()) == Order(None)
    assert codec.write(Order(None), order_id="o") == fleet_pb2.CalibrateOrder(order_id="o")
    assert codec.read(codec.write(Order("small"))) == Order("small")


def test_dataclasses_and_tuples_are_walked_with_the_codec_that_was_given() -> None:
    @dataclass(frozen=True)
    class Calibrating:
        node_id: str
        update: Update | None
        models: tuple[Part, ...]

    others = {*fleet_pb2.ModelState.DESCRIPTOR.fields_by_name} - {"name"}
    part = Codec(Part, fleet_pb2.ModelState, by_hand=[*others, "is_working", "read_seconds"])
    codec = Codec(Calibrating, admin_pb2.CalibrateResponse, nested=[part])
    event = Calibrating("pi", Update("o", Phase.DONE, "", None), (Part("a"), Part("b")))
    assert codec.read(codec.write(event)) == event
    assert codec.read(admin_pb2.CalibrateResponse()) == Calibrating("", None, ())


def test_enum_whose_value_is_a_string_on_the_wire_is_sent_as_its_value() -> None:
    @dataclass(frozen=True)
    class Explained:
        state: Phase

    others = {*router_pb2.ExplainResponse.DESCRIPTOR.fields_by_name} - {"state"}
    codec = Codec(Explained, router_pb2.ExplainResponse, by_hand=others)
    assert codec.write(Explained(Phase.DONE)).state == "done"
    assert codec.read(codec.write(Explained(Phase.DONE))) == Explained(Phase.DONE)


def test_check_sees_what_was_read_and_never_what_is_absent() -> None:
    codec = Codec(Update, fleet_pb2.OrderUpdate, checks={"progress_ratio": lambda r: min(r, 1.0)})
    assert codec.read(fleet_pb2.OrderUpdate(progress_ratio=7.0)).progress_ratio == 1.0
    assert codec.read(fleet_pb2.OrderUpdate()).progress_ratio is None


def test_field_of_another_name_is_found_by_the_table() -> None:
    @dataclass(frozen=True)
    class Load:
        model: str
        is_working: bool
        read_seconds: float

    codec = Codec(Load, fleet_pb2.SensorState, renamed={"model": "name"})
    assert codec.write(Load("small", True, 2.0)).name == "small"
    assert codec.read(codec.write(Load("small", True, 2.0))) == Load("small", True, 2.0)


def test_field_that_is_made_of_several_is_read_and_written_by_a_function() -> None:
    @dataclass(frozen=True)
    class Load:
        name: str
        total: int

    codec = Codec(
        Load,
        fleet_pb2.TokenPrice,
        read_with={
            "name": lambda message: str(message.request_usd),
            "total": lambda message: message.prompt_usd_per_token + message.request_usd,
        },
        write_with={
            "prompt_usd_per_token": lambda load: load.total / 2,
            "completion_usd_per_token": lambda load: None,
            "request_usd": lambda load: load.total / 2,
        },
    )
    assert codec.read(codec.write(Load("4.0", 8))) == Load("4.0", 8)
