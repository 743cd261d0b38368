import dataclasses
import math
from collections.abc import Callable

import pytest

from controller.domain.completion import FailureKind, FinishReason, Usage
from controller.domain.node_report import ModelPhase, SensorState
from controller.domain.request import ChatMessage, InferenceRequest, Sampling
from controller.fleet.convert import (
    ATTRIBUTES,
    COMPLETION,
    HEALTH,
    MODEL,
    BadReportError,
    hello_from_proto,
    models_from_proto,
    work_order,
)
from controller.ids import ModelName, RequestId
from pointsman.convert import USAGE
from pointsman.v1 import fleet_pb2, types_pb2
from tests.fakes.reports import health, hello, reported_model


def model_message() -> fleet_pb2.ModelState:
    return MODEL.write(reported_model())


def hello_message() -> fleet_pb2.Hello:
    return fleet_pb2.Hello(
        node_id="pi",
        instance_id="first-start",
        attributes=ATTRIBUTES.write(hello().attributes),
        models=[model_message()],
    )


def test_introduction_arrives_as_it_was_sent() -> None:
    assert hello_from_proto(hello_message()) == hello()


@pytest.mark.parametrize("phase", ModelPhase)
def test_model_survives_the_wire(phase: ModelPhase) -> None:
    model = reported_model(phase=phase, issue="why", price=reported_model().price)
    assert models_from_proto([MODEL.write(model)]) == (model,)


def test_what_is_unknown_stays_unknown() -> None:
    bare = reported_model(calibration=None, characters_per_token=None)
    assert models_from_proto([MODEL.write(bare)]) == (bare,)
    message = hello_message()
    for name in ("idle_watts", "max_watts"):
        message.attributes.ClearField(name)  # type: ignore[arg-type]
    assert hello_from_proto(message).attributes.power is None
    unknown = health(temperature_celsius=None, power_watts=None, power_source="none")
    assert HEALTH.read(HEALTH.write(unknown)) == unknown


def test_health_survives_the_wire() -> None:
    sample = health(
        is_throttled=True,
        sensors=(SensorState("jtop", True, 0.002), SensorState("rapl", False, 0.0)),
        issues=("hot",),
        power_mode="15W",
        gpu_utilisation_ratio=0.5,
        energy_today_joules=1234.5,
    )
    assert HEALTH.read(HEALTH.write(sample)) == sample


@pytest.mark.parametrize("source", ["none", "estimate", "ina3221", "jtop", "a-meter-of-next-year"])
def test_name_of_any_source_survives_the_wire(source: str) -> None:
    sample = health(power_source=source)
    assert HEALTH.read(HEALTH.write(sample)) == sample
    used = Usage(energy_joules=1.0, energy_source=source)
    assert USAGE.read(USAGE.write(used)) == used
    assert USAGE.write(used).is_energy_estimate == (source == "estimate")


def test_agent_older_than_names_of_sources_is_understood() -> None:
    for value, name in (
        (types_pb2.POWER_SOURCE_UNSPECIFIED, "none"),
        (types_pb2.POWER_SOURCE_NONE, "none"),
        (types_pb2.POWER_SOURCE_ESTIMATE, "estimate"),
        (types_pb2.POWER_SOURCE_RAPL, "rapl"),
        (types_pb2.POWER_SOURCE_INA3221, "ina3221"),
        (types_pb2.POWER_SOURCE_NVML, "nvml"),
        (types_pb2.POWER_SOURCE_PMIC, "pmic"),
    ):
        sample = fleet_pb2.HealthSample(power_watts=1.0, power_source=value)
        assert HEALTH.read(sample).power_source == name
        usage = types_pb2.Usage(energy_joules=1.0, energy_source=value)
        assert USAGE.read(usage).energy_source == name


def test_source_that_says_it_is_an_estimate_counts_as_one_whatever_its_name() -> None:
    sample = fleet_pb2.HealthSample(
        power_watts=1.0, power_source_name="guess-by-fan-noise", is_power_estimate=True
    )
    assert HEALTH.read(sample).power_source == "estimate"


def test_clock_of_the_node_is_never_asked() -> None:
    """A board without a clock battery reports 1970, or next year."""
    message = HEALTH.write(health())
    message.sample_time.FromSeconds(0)
    assert HEALTH.read(message) == health()
    message.sample_time.FromSeconds(4_000_000_000)
    assert HEALTH.read(message) == health()


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "put",
    [
        lambda m, v: setattr(m.models[0].calibration, "prefill_tokens_per_second", v),
        lambda m, v: setattr(m.models[0].calibration, "decode_tokens_per_second", v),
        lambda m, v: setattr(m.models[0].calibration, "saturated_decode_tokens_per_second", v),
        lambda m, v: setattr(m.models[0].calibration, "utilisation_ratio", v),
        lambda m, v: setattr(m.models[0], "parameters_billions", v),
        lambda m, v: setattr(m.models[0], "characters_per_token", v),
        lambda m, v: setattr(m.models[0].price, "prompt_usd_per_token", v),
        lambda m, v: setattr(m.models[0].price, "completion_usd_per_token", v),
        lambda m, v: setattr(m.models[0].price, "request_usd", v),
        lambda m, v: setattr(m.attributes, "idle_watts", v),
        lambda m, v: setattr(m.attributes, "max_watts", v),
        lambda m, v: setattr(m.attributes, "transmit_watts", v),
        lambda m, v: setattr(m.attributes, "receive_watts", v),
    ],
)
def test_report_that_cannot_be_is_refused(
    put: Callable[[fleet_pb2.Hello, float], None], value: float
) -> None:
    """One such number would spoil the sums of every decision."""
    message = hello_message()
    put(message, value)
    with pytest.raises(BadReportError, match=r"cannot be (-1|nan|inf)"):
        hello_from_proto(message)


@pytest.mark.parametrize(
    "name",
    [
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "saturated_decode_tokens_per_second",
    ],
)
def test_speed_of_zero_is_refused(name: str) -> None:
    message = model_message()
    setattr(message.calibration, name, 0.0)
    with pytest.raises(BadReportError, match=name):
        models_from_proto([message])


def test_board_that_draws_more_when_idle_is_refused() -> None:
    message = hello_message()
    message.attributes.idle_watts, message.attributes.max_watts = 12.0, 3.0
    with pytest.raises(BadReportError, match="max_watts"):
        hello_from_proto(message)


def test_introduction_needs_its_names() -> None:
    for name in ("node_id", "instance_id"):
        message = hello_message()
        message.ClearField(name)  # type: ignore[arg-type]
        with pytest.raises(BadReportError, match="lacks node_id or instance_id"):
            hello_from_proto(message)
    nameless = model_message()
    nameless.name = ""
    with pytest.raises(BadReportError, match="no name"):
        models_from_proto([nameless])


def test_all_slots_together_are_at_least_as_fast_as_one() -> None:
    message = model_message()
    message.calibration.decode_tokens_per_second = 20.0
    message.calibration.saturated_decode_tokens_per_second = 5.0
    (model,) = models_from_proto([message])
    assert model.calibration is not None
    assert model.calibration.saturated_decode_tokens_per_second == 20.0


def test_failure_keeps_its_kind_and_an_unknown_one_still_is_a_failure() -> None:
    message = fleet_pb2.Completion(
        finish_reason=types_pb2.FINISH_REASON_FAILED,
        failure=fleet_pb2.WorkFailure(kind=fleet_pb2.WORK_FAILURE_KIND_QUEUE_FULL, message="full"),
    )
    completion = COMPLETION.read(message)
    assert (completion.failure, completion.message) == (FailureKind.QUEUE_FULL, "full")
    message.failure.kind = 99  # type: ignore[assignment]
    assert COMPLETION.read(message).failure is FailureKind.INTERNAL
    message.finish_reason = 99  # type: ignore[assignment]
    assert COMPLETION.read(message).reason is FinishReason.FAILED


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_of_failure_has_its_number(kind: FailureKind) -> None:
    number = fleet_pb2.WorkFailureKind.Value(f"WORK_FAILURE_KIND_{kind.name}")
    message = fleet_pb2.Completion(
        finish_reason=types_pb2.FINISH_REASON_FAILED, failure=fleet_pb2.WorkFailure(kind=number)
    )
    assert COMPLETION.read(message).failure is kind


def test_unknown_energy_is_absent_and_never_zero() -> None:
    usage = USAGE.read(types_pb2.Usage(prompt_tokens=3))
    assert usage.energy_joules is None
    assert not USAGE.write(usage).HasField("energy_joules")
    measured = dataclasses.replace(usage, energy_joules=0.5, energy_source="rapl")
    assert USAGE.read(USAGE.write(measured)) == measured


def test_node_cannot_have_held_more_of_a_prompt_than_there_was() -> None:
    for told, read in ((-1, 0), (3, 3), (9, 5)):
        usage = types_pb2.Usage(prompt_tokens=5, cached_prompt_tokens=told)
        assert USAGE.read(usage).cached_prompt_tokens == read


def test_order_carries_every_default_filled_in() -> None:
    chat = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hello"))
    sampling = Sampling(max_tokens=7, temperature=0.0, top_k=0, seed=0, stop=("\n",))
    request = InferenceRequest(RequestId("r1"), chat, sampling=sampling)
    order = work_order(request, 2, ModelName("small"), 30.0)
    assert [(turn.role, turn.content) for turn in order.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hello"),
    ]
    assert (order.request_id, order.attempt, order.model) == ("r1", 2, "small")
    assert order.time_limit_seconds == 30.0
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed"):
        assert order.sampling.HasField(name)
    assert order.sampling.top_p == 0.95
    assert list(order.sampling.stop) == ["\n"]
    raw = work_order(InferenceRequest(RequestId("r2"), "Raw"), 1, ModelName("small"), 1.0)
    assert raw.WhichOneof("input") == "prompt"
    assert not raw.sampling.HasField("seed")
