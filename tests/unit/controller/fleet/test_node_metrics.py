import time

import pytest

from controller.domain.completion import Usage
from controller.domain.node_report import SensorState
from controller.fleet.node_metrics import register_node_metrics
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler.events import (
    HealthReported,
    RequestDispatched,
    RequestEnded,
    TokensStreamed,
)
from controller.profiler.request_monitor import Claim
from controller.profiler.state import ProfilerState
from controller.telemetry.metrics import Metrics
from tests.fakes.reports import health, hello, join, reported_model
from tests.fakes.scraped import scraped

PI = NodeId("pi")


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> ProfilerState:
    """Of a node that joined at 1 s, was sent two requests at 2 s and ended one of them at 5 s."""
    made = ProfilerState(10.0)
    models = (reported_model(), reported_model("new", digest="1" * 64, calibration=None))
    join(made, 1.0, hello(PI, models=models))
    for number in range(2):
        request_id = RequestId(f"r{number}")
        made.apply(RequestDispatched(PI, request_id, Claim(ModelName("small"), 2.0, 50.0)), 2.0)
    made.apply(TokensStreamed(PI, RequestId("r0"), 1), 2.5)
    made.apply(RequestEnded(PI, RequestId("r0"), False, usage=Usage(9, 50, 0.0, 0.5, 2.4)), 5.0)
    sensors = (SensorState("jtop", True, 0.25), SensorState("rapl", False, 0.0))
    made.apply(HealthReported(PI, health(sensors=sensors)), 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    return made


def test_node_is_told_with_its_state_load_health_and_speeds(profiler: ProfilerState) -> None:
    metrics = Metrics()
    register_node_metrics(metrics, profiler)
    found = scraped(metrics)
    record = profiler.nodes[PI]
    speeds = record.calibration_of(record.models[0])
    assert speeds is not None
    expected = {
        "profiler_events_total{event=Dispatched}": 2,
        "node_state{node=pi,state=ready}": 1,
        "node_state{node=pi,state=offline}": 0,
        "node_ended_requests_total{node=pi,outcome=completed}": 1,
        "node_ended_requests_total{node=pi,outcome=cancelled}": 0,
        "node_inflight_requests{node=pi}": 1,
        "node_backlog_seconds{node=pi}": record.requests.backlog_seconds(7.0),
        "node_health_age_seconds{node=pi}": 6,
        "node_temperature_celsius{node=pi}": 50,
        "node_power_watts{node=pi}": 4,
        "node_sensor_is_working{node=pi,sensor=jtop}": 1,
        "node_sensor_is_working{node=pi,sensor=rapl}": 0,
        "node_sensor_read_seconds{node=pi,sensor=jtop}": 0.25,
        "model_is_ready{model=small,node=pi}": 1,
        "model_is_ready{model=new,node=pi}": 0,
        "model_speed_age_seconds{model=small,node=pi}": 2,
        "model_tokens_per_second{model=small,node=pi,phase=prefill}": (
            speeds.prefill_tokens_per_second
        ),
        "model_tokens_per_second{model=small,node=pi,phase=decode}": (
            speeds.decode_tokens_per_second
        ),
        "model_tokens_per_second{model=small,node=pi,phase=saturated}": (
            speeds.saturated_decode_tokens_per_second
        ),
    }
    assert {key: found.get(key) for key in expected} == expected
    for unknown in (
        "node_is_throttled{node=pi}",
        "node_round_trip_seconds{node=pi}",
        "model_speed_age_seconds{model=new,node=pi}",
        "model_tokens_per_second{model=new,node=pi,phase=decode}",
    ):
        assert unknown not in found  # it has no sample; 0 would be a lie
