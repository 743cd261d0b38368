from pathlib import Path

import pytest

from edge_agent.config import LinkSettings, ModelSettings
from edge_agent.engine.base import LoadedModel, Message, Sampling
from edge_agent.engine.spec import PreparedModel
from edge_agent.identity import HostDescription
from edge_agent.link.convert import (
    attributes_to_proto,
    completion_to_proto,
    health_to_proto,
    model_to_proto,
    work_from_proto,
)
from edge_agent.sensors.base import ESTIMATE, Coverage, Readings, SensorStatus
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.sampler import PowerState
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.completion import Completion, FailureKind, FinishReason, Usage
from edge_agent.serving.lifecycle import Ask, Known, Loading
from pointsman.v1 import fleet_pb2, types_pb2
from tests.fakes.hosted import READY, hosted_model

HOST = HostDescription("Board", 4, 8_000_000_000, "Linux")
READINGS = Readings(
    1.0, cpu_utilisation_ratio=0.5, memory_available_bytes=1_000_000_000, uptime_seconds=12.0
)
NO_POWER = PowerState(None, None, None, None, None, None, "")


def test_order_keeps_what_was_sent_and_fills_in_the_rest() -> None:
    message = fleet_pb2.WorkOrder(
        request_id="r1",
        attempt=2,
        model="small",
        sampling=types_pb2.SamplingParameters(max_tokens=0, temperature=0.0, top_k=0, seed=0),
    )
    message.chat.messages.add(role="user", content="Hello")
    order = work_from_proto(message)
    assert (order.request_id, order.attempt, order.model) == ("r1", 2, "small")
    assert order.prompt == (Message("user", "Hello"),)
    assert order.sampling == Sampling(0, 0.0, 0.95, 0, 0, ())
    assert order.time_limit_seconds > 0
    raw = fleet_pb2.WorkOrder(request_id="r1", prompt="Raw", time_limit_seconds=3.0)
    assert work_from_proto(raw).prompt == "Raw"
    assert work_from_proto(raw).time_limit_seconds == 3.0
    assert work_from_proto(raw).sampling == Sampling()


def test_order_without_an_input_is_an_empty_prompt_for_the_engine_to_refuse() -> None:
    assert work_from_proto(fleet_pb2.WorkOrder(request_id="r1")).prompt == ""


@pytest.mark.parametrize("outcome", FinishReason)
def test_every_outcome_has_its_number(outcome: FinishReason) -> None:
    message = completion_to_proto(Completion("r1", 1, "small", outcome))
    assert types_pb2.FinishReason.Name(message.finish_reason) == f"FINISH_REASON_{outcome.name}"
    assert not message.HasField("failure")


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_of_failure_has_its_number(kind: FailureKind) -> None:
    message = completion_to_proto(
        Completion("r1", 1, "small", FinishReason.FAILED, failure=kind, message="why")
    )
    name = fleet_pb2.WorkFailureKind.Name(message.failure.kind)
    assert name == f"WORK_FAILURE_KIND_{kind.name}"
    assert message.failure.message == "why"


def test_unknown_energy_is_absent_and_a_known_one_says_that_it_is_estimated() -> None:
    unknown = completion_to_proto(Completion("r1", 1, "small", FinishReason.STOP)).usage
    assert not unknown.HasField("energy_joules")
    assert unknown.energy_source == types_pb2.POWER_SOURCE_NONE
    known = completion_to_proto(
        Completion(
            "r1", 1, "m", FinishReason.STOP, Usage(energy_joules=0.0, energy_source="estimate")
        )
    ).usage
    assert known.HasField("energy_joules")
    assert known.energy_source == types_pb2.POWER_SOURCE_ESTIMATE


def test_board_without_a_power_model_has_no_power_and_not_zero_power() -> None:
    attributes = attributes_to_proto(HOST, "edge", "0.1.0", "", None, None, None, LinkSettings())
    for name in ("idle_watts", "max_watts", "transmit_watts", "receive_watts"):
        assert not attributes.HasField(name)  # type: ignore[arg-type]
    assert attributes.power_source == types_pb2.POWER_SOURCE_NONE
    sample = health_to_proto(READINGS, NO_POWER)
    assert not sample.HasField("power_watts")
    assert (sample.power_source, sample.power_source_name) == (types_pb2.POWER_SOURCE_NONE, "none")
    for name in ("temperature_celsius", "is_throttled", "gpu_utilisation_ratio"):
        assert not sample.HasField(name)  # type: ignore[arg-type]


def test_sensors_are_sent_with_their_success_and_their_seconds() -> None:
    sensors = [
        SensorStatus("jtop", True, True, 0.25),
        SensorStatus("rapl", False, False, 0.0, "permission denied", "a group"),
    ]
    sent = health_to_proto(READINGS, NO_POWER, [], sensors).sensors
    assert [(each.name, each.is_working, each.read_seconds) for each in sent] == [
        ("jtop", True, 0.25),
        ("rapl", False, 0.0),
    ]


def test_power_of_the_boards_model_says_that_it_is_estimated() -> None:
    power = PowerModel(4.0, 10.0)
    attributes = attributes_to_proto(HOST, "cloud", "0.1.0", "", power, 0.5, None, LinkSettings())
    assert attributes.kind == types_pb2.NODE_KIND_CLOUD
    assert (attributes.idle_watts, attributes.max_watts, attributes.transmit_watts) == (4, 10, 0.5)
    estimate = PowerState(power.watts(0.5), ESTIMATE, power.coverage, 0.2, 1.0, 0.0, "")
    sample = health_to_proto(READINGS, estimate, ["model_file_missing: small"])
    assert sample.power_watts == pytest.approx(7.0)
    assert sample.power_source == types_pb2.POWER_SOURCE_ESTIMATE
    assert list(sample.issues) == ["model_file_missing: small"]


def test_model_is_described_as_far_as_it_is_known() -> None:
    settings = ModelSettings("small", slots=3, prompt_usd_per_token=0.5)
    loading = model_to_proto(hosted_model(settings, Loading(Ask(), "loading")))
    assert (loading.phase, loading.issue, loading.slots) == (
        fleet_pb2.MODEL_PHASE_LOADING,
        "loading",
        3,
    )
    assert not loading.HasField("calibration")
    assert not loading.HasField("characters_per_token")
    ready = model_to_proto(
        hosted_model(
            settings,
            READY,
            known=Known(
                PreparedModel(Path("/m"), "abc", "llama", 0.1, "Q4_0", 8192, None),
                LoadedModel(2048, 2, True, None, "fake", None, 4.5, "fake", None),
                Speeds(100.0, 10.0, 20.0, utilisation_ratio=0.75),
            ),
        )
    )
    assert (ready.context_tokens, ready.slots, ready.digest) == (2048, 2, "abc")
    assert ready.calibration.saturated_decode_tokens_per_second == 20.0
    assert ready.calibration.utilisation_ratio == 0.75
    assert ready.characters_per_token == 4.5
    assert ready.price.prompt_usd_per_token == 0.5


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("ina3221", types_pb2.POWER_SOURCE_INA3221),
        ("jtop", types_pb2.POWER_SOURCE_SENSOR),
        ("a-meter-of-next-year", types_pb2.POWER_SOURCE_SENSOR),
        ("estimate", types_pb2.POWER_SOURCE_ESTIMATE),
    ],
)
def test_any_source_is_sent_by_its_own_name(
    source: str, value: types_pb2.PowerSource.ValueType
) -> None:
    power = PowerState(4.0, source, Coverage.BOARD, 0.05, 10.0, 0.0, "a rail")
    sample = health_to_proto(READINGS, power)
    assert (sample.power_source_name, sample.power_source) == (source, value)
    assert sample.is_power_estimate == (source == "estimate")
    usage = completion_to_proto(
        Completion("r1", 1, "m", FinishReason.STOP, Usage(energy_joules=1.0, energy_source=source))
    ).usage
    assert (usage.energy_source_name, usage.energy_source) == (source, value)
    assert usage.is_energy_estimate == (source == "estimate")


def test_price_of_the_link_is_sent_and_makes_it_a_metered_one() -> None:
    free = attributes_to_proto(HOST, "edge", "0.1.0", "", None, None, None, LinkSettings())
    assert not free.is_link_metered
    capped = LinkSettings(is_metered=True)
    assert attributes_to_proto(HOST, "edge", "0.1.0", "", None, None, None, capped).is_link_metered
    priced = LinkSettings(receive_usd_per_gigabyte=0.5, transmit_usd_per_gigabyte=4.0)
    sent = attributes_to_proto(HOST, "edge", "0.1.0", "", None, None, None, priced)
    assert sent.is_link_metered
    assert (sent.receive_usd_per_gigabyte, sent.transmit_usd_per_gigabyte) == (0.5, 4.0)


def test_share_of_the_power_range_is_the_measured_one_and_absent_when_nobody_looked() -> None:
    def sent(speeds: Speeds) -> fleet_pb2.Calibration:
        settings = ModelSettings("small")
        model = hosted_model(settings, READY, known=Known(None, None, speeds))
        return model_to_proto(model).calibration

    assert sent(Speeds(10.0, 2.0, 4.0, utilisation_ratio=0.25)).utilisation_ratio == 0.25
    assert not sent(Speeds(10.0, 2.0, 4.0)).HasField("utilisation_ratio")
