"""What an account and a node's state become in a measurement."""

import pytest

from controller.domain.request import ChatMessage
from controller.lab.offline.accounts import HowAsked, measurement
from controller.lab.offline.graders import Grade, Grader, Key
from controller.lab.offline.questions import Question
from controller.quality.store import prompt_digest
from pointsman.v1 import admin_pb2, fleet_pb2, router_pb2, types_pb2

QUESTION = Question(
    "sums", "sum-1", "maths", (ChatMessage("user", "1 + 1?"),), Key(Grader.NUMERIC, ("2", "two"))
)
ASKED = HowAsked("run-1", "routed", 64, 7, 3, None)


def test_everything_that_is_known_is_kept() -> None:
    account = router_pb2.Account(
        node_id="pi",
        model="small",
        policy="memetic",
        batch_id="b1",
        query_class="maths",
        finish_reason=types_pb2.FINISH_REASON_LENGTH,
        usage=types_pb2.Usage(
            prompt_tokens=9,
            completion_tokens=4,
            queue_seconds=0.5,
            prefill_seconds=1.0,
            decode_seconds=2.0,
            energy_joules=0.0,
            energy_source=types_pb2.POWER_SOURCE_INA3221,
        ),
        measured_finish_seconds=3.75,
        attempts=2,
    )
    node = admin_pb2.NodeStatus(
        node_id="pi",
        attributes=fleet_pb2.StaticAttributes(
            kind=types_pb2.NODE_KIND_EDGE, hardware="board", cpu_cores=4, memory_bytes=1000
        ),
        models=[
            fleet_pb2.ModelState(name="other", family="no"),
            fleet_pb2.ModelState(
                name="small",
                family="llama",
                quantisation="Q4_0",
                calibration=fleet_pb2.Calibration(
                    decode_tokens_per_second=12.0, engine_version="engine 1"
                ),
            ),
        ],
        health=fleet_pb2.HealthSample(
            cpu_utilisation_ratio=0.5,
            memory_available_bytes=250,
            gpu_utilisation_ratio=0.25,
            is_throttled=False,
            power_mode="15W",
        ),
        round_trip_seconds=0.01,
    )
    row = measurement(QUESTION, ASKED, "2", Grade(1.0, "2"), account, node)
    assert (row.node_kind, row.hardware, row.power_mode) == ("edge", "board", "15W")
    assert (row.model_family, row.engine_version) == ("llama", "engine 1")
    assert row.calibrated_decode_tokens_per_second == 12.0
    assert row.network_seconds == pytest.approx(0.25)
    assert row.finish_reason == "length"
    assert (row.energy_joules, row.energy_source) == (0.0, "ina3221")  # a measured 0 is known
    assert row.memory_utilisation_ratio == pytest.approx(0.75)
    assert (row.has_gpu, row.gpu_utilisation_ratio, row.is_throttled) == (True, 0.25, False)
    assert (row.query_class, row.expected_answer, row.score_ratio) == ("maths", "2\ntwo", 1.0)
    assert row.prompt_digest == prompt_digest("1 + 1?").hex()
    assert (row.max_tokens, row.seed, row.inflight_requests, row.batch_requests) == (64, 7, 3, None)


def test_sensor_is_called_by_its_own_name() -> None:
    usage = types_pb2.Usage(
        energy_joules=1.0,
        energy_source=types_pb2.POWER_SOURCE_SENSOR,
        energy_source_name="jtop",
    )
    account = router_pb2.Account(node_id="pi", model="small", usage=usage)
    node = admin_pb2.NodeStatus(node_id="pi")
    assert measurement(QUESTION, ASKED, "", Grade(None, ""), account, node).energy_source == "jtop"


def test_what_nobody_told_is_unknown_and_not_zero() -> None:
    account = router_pb2.Account(node_id="gone", model="small")
    node = admin_pb2.NodeStatus(node_id="gone")
    row = measurement(QUESTION, ASKED, "", Grade(None, ""), account, node)
    for name in (
        "energy_joules", "prefill_joules", "decode_joules", "cpu_utilisation_ratio",
        "gpu_utilisation_ratio", "memory_utilisation_ratio", "power_watts",
        "temperature_celsius", "is_throttled", "round_trip_seconds", "score_ratio",
        "calibrated_prefill_tokens_per_second", "calibrated_decode_tokens_per_second",
        "calibrated_saturated_tokens_per_second",
    ):  # fmt: skip
        assert getattr(row, name) is None
    assert (row.node_kind, row.finish_reason, row.energy_source) == ("", "", "none")
    assert not row.has_gpu
