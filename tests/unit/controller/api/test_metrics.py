from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.api.metrics import ControllerMetrics
from controller.api.service import Figures, NodeView
from controller.domain.batch import DecisionTotals
from controller.domain.completion import Usage
from controller.domain.request_record import RequestState
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler.events import Dispatched, Ended, TokensStreamed
from controller.profiler.state import ProfilerState
from controller.routing.policy import FallbackCause
from controller.storage.base import StoreState
from controller.telemetry.loop_lag import LoopLag
from tests.fakes.figures import figures_of
from tests.fakes.reports import hello, join, reported_model

PI = NodeId("pi")
DOCUMENT = Path(__file__).parents[4] / "docs" / "http-api.md"


class Controller:
    """One of which only its figures are known."""

    def __init__(self, figures: Figures) -> None:
        self.now = figures

    def figures(self) -> Figures:
        return self.now


def read(metrics: ControllerMetrics) -> dict[str, float]:
    """Every sample as Prometheus understands it; labels in order of their names."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{key}={sample.labels[key]}" for key in sorted(sample.labels))
            found[f"{sample.name.removeprefix('pointsman_')}{{{labels}}}"] = sample.value
    return found


def view(profiler: ProfilerState, node_id: NodeId, now: float) -> NodeView:
    record = profiler.nodes[node_id]
    return NodeView(
        node_id,
        record,
        0.0,
        record.requests.backlog_seconds(now),
        record.path.round_trip_age_seconds(now),
        record.path.goodput_age_seconds(now),
        None if record.health_at is None else now - record.health_at,
        record.models,
        tuple(record.speed_age_seconds(model, now) for model in record.models),
    )


def test_every_metric_is_documented() -> None:
    text = ControllerMetrics(Controller(figures_of())).text().decode()
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(families) > 20
    described = DOCUMENT.read_text(encoding="utf-8")
    missing = [name for name in families if f"`{name.removeprefix('pointsman_')}`" not in described]
    assert missing == []


def test_every_scrape_reads_the_figures_anew() -> None:
    cause = next(iter(FallbackCause))
    controller = Controller(figures_of())
    metrics = ControllerMetrics(controller)
    key = f'policy_fallback_requests_total{{cause={cause.value},policy=od"d}}'
    assert key not in read(metrics)
    controller.now = figures_of(fallbacks={('od"d', cause): 3})
    assert read(metrics)[key] == 3.0
    controller.now = figures_of(fallbacks={('od"d', cause): 4})
    assert read(metrics)[key] == 4.0


def test_one_policy_may_leave_requests_for_several_causes() -> None:
    counts = {("ppo", cause): number for number, cause in enumerate(FallbackCause, 1)}
    found = read(ControllerMetrics(Controller(figures_of(fallbacks=counts))))
    for (policy, cause), count in counts.items():
        key = f"policy_fallback_requests_total{{cause={cause.value},policy={policy}}}"
        assert found[key] == count


def test_lag_of_the_loop_is_a_histogram_of_all_wakings() -> None:
    lag = LoopLag()
    for seconds in (0.0, 0.004, 0.05, 0.3, 7.0):
        lag.observe(seconds)
    found = read(ControllerMetrics(Controller(figures_of(loop_lag=lag))))
    buckets = {
        bound: found[f"event_loop_lag_seconds_bucket{{le={bound}}}"]
        for bound in ("0.001", "0.005", "0.01", "0.05", "0.1", "0.5", "1", "+Inf")
    }
    assert list(buckets.values()) == [1, 2, 2, 3, 3, 4, 4, 5]
    assert found["event_loop_lag_seconds_count{}"] == 5
    assert found["event_loop_lag_seconds_sum{}"] == pytest.approx(7.354)


def test_requests_decisions_events_and_what_waits_are_told() -> None:
    figures = figures_of(
        waiting_requests=2,
        running_requests=5,
        ended_requests={RequestState.COMPLETED: 7, RequestState.FAILED: 1},
        decisions={"memetic": DecisionTotals(3, 24, 0.6)},
        events={"HealthReported": 9},
        storage=StoreState(4, 1, "disk_full: no space"),
        learning_waiting=6,
        learning_dropped=8,
        profiled_prompts=36_497,
    )
    found = read(ControllerMetrics(Controller(figures)))
    expected = {
        "waiting_requests{}": 2,
        "running_requests{}": 5,
        "ended_requests_total{outcome=completed}": 7,
        "ended_requests_total{outcome=failed}": 1,
        "ended_requests_total{outcome=cancelled}": 0,
        "decision_seconds_count{policy=memetic}": 3,
        "decision_seconds_sum{policy=memetic}": 0.6,
        "decided_requests_total{policy=memetic}": 24,
        "profiler_events_total{event=HealthReported}": 9,
        "storage_waiting{}": 4,
        "storage_is_failing{}": 1,
        "storage_lost_requests_total{}": 1,
        "learning_waiting{}": 6,
        "learning_dropped_outcomes_total{}": 8,
        "profiled_prompts{}": 36_497,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_node_is_told_with_its_state_load_health_and_speeds() -> None:
    profiler = ProfilerState(10.0)
    models = (reported_model(), reported_model("new", digest="1" * 64, calibration=None))
    join(profiler, 1.0, hello(PI, models=models))
    for number in range(2):
        request_id = RequestId(f"r{number}")
        profiler.apply(Dispatched(PI, request_id, ModelName("small"), 2.0, 50.0), 2.0)
    profiler.apply(TokensStreamed(PI, RequestId("r0"), 1), 2.5)
    profiler.apply(Ended(PI, RequestId("r0"), False, usage=Usage(9, 50, 0.0, 0.5, 2.4)), 5.0)
    found = read(ControllerMetrics(Controller(figures_of(nodes=(view(profiler, PI, 7.0),)))))
    expected = {
        "node_state{node=pi,state=ready}": 1,
        "node_state{node=pi,state=offline}": 0,
        "node_ended_requests_total{node=pi,outcome=completed}": 1,
        "node_ended_requests_total{node=pi,outcome=cancelled}": 0,
        "node_inflight_requests{node=pi}": 1,
        "node_backlog_seconds{node=pi}": profiler.nodes[PI].requests.backlog_seconds(7.0),
        "node_health_age_seconds{node=pi}": 6,
        "node_temperature_celsius{node=pi}": 50,
        "node_power_watts{node=pi}": 4,
        "model_is_ready{model=small,node=pi}": 1,
        "model_is_ready{model=new,node=pi}": 0,
        "model_speed_age_seconds{model=small,node=pi}": 2,
        "model_tokens_per_second{model=small,node=pi,phase=prefill}": 200,
        "model_tokens_per_second{model=small,node=pi,phase=saturated}": 60,
    }
    assert {key: found.get(key) for key in expected} == expected
    for unknown in (
        "node_is_throttled{node=pi}",
        "node_round_trip_seconds{node=pi}",
        "model_speed_age_seconds{model=new,node=pi}",
        "profiled_prompts{}",
    ):
        assert unknown not in found  # it has no sample; 0 would be a lie
