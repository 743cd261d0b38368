"""What Prometheus reads of a controller."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from controller.api.service import Figures, NodeView
from controller.domain.cluster import NodeState
from controller.domain.node_report import Health
from controller.domain.request_record import RequestState
from controller.telemetry.loop_lag import BOUNDS_SECONDS, LoopLag

__all__ = ["CONTENT_TYPE", "ControllerMetrics", "TellsFigures"]


class TellsFigures(Protocol):
    """Where the figures come from; asked again at every scrape."""

    def figures(self) -> Figures:
        """As they stand now."""
        ...


class ControllerMetrics(Collector):
    """The metrics of one controller; a registry of its own, since tests run several."""

    def __init__(self, source: TellsFigures) -> None:
        self._source = source
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """As they stand now; what is unknown has no sample."""
        figures = self._source.figures()
        yield from _of_requests(figures)
        yield from _of_keeping(figures)
        yield _of_loop(figures.loop_lag)
        yield from _of_nodes(figures.nodes)
        yield from _of_models(figures.nodes)

    def text(self) -> bytes:
        """In Prometheus' text format, for `CONTENT_TYPE`."""
        return generate_latest(self._registry)


def _of_requests(figures: Figures) -> Iterator[Metric]:
    yield _gauge(
        "waiting_requests",
        "Requests that no window has closed on yet.",
        figures.waiting_requests,
    )
    yield _gauge("running_requests", "Requests that have not ended.", figures.running_requests)
    yield _counter(
        "ended_requests",
        "Requests that have ended, and how.",
        ("outcome",),
        {
            (state.value,): figures.ended_requests.get(state, 0)
            for state in RequestState
            if state.is_final
        },
    )
    decisions = SummaryMetricFamily(
        "pointsman_decision_seconds",
        "From the closed window to the decision, batch by batch.",
        labels=("policy",),
    )
    for policy, totals in figures.decisions.items():
        decisions.add_metric((policy,), totals.batches, totals.seconds)
    yield decisions
    yield _counter(
        "decided_requests",
        "Requests of live batches, by the policy that decided them.",
        ("policy",),
        {(policy,): totals.requests for policy, totals in figures.decisions.items()},
    )
    yield _counter(
        "policy_fallback_requests",
        "Requests that another policy decided than the one in force.",
        ("policy", "cause"),
        {(policy, cause.value): count for (policy, cause), count in figures.fallbacks.items()},
    )


def _of_keeping(figures: Figures) -> Iterator[Metric]:
    yield _counter(
        "profiler_events",
        "Events of agents and dispatches that were taken in.",
        ("event",),
        {(kind,): count for kind, count in figures.events.items()},
    )
    storage = figures.storage
    yield _gauge("storage_waiting", "Values that are not yet in the database.", storage.waiting)
    yield _gauge("storage_is_failing", "Whether the database takes nothing.", bool(storage.issue))
    yield _counter(
        "storage_lost_requests",
        "Finished requests that were dropped because they could not be written.",
        (),
        {(): storage.lost},
    )
    yield _gauge("learning_waiting", "Outcomes not yet learnt.", figures.learning_waiting)
    yield _counter(
        "learning_dropped_outcomes",
        "Outcomes that found no room to wait.",
        (),
        {(): figures.learning_dropped},
    )
    yield _gauge("profiled_prompts", "Prompts in the quality store.", figures.profiled_prompts)


def _of_loop(lag: LoopLag) -> HistogramMetricFamily:
    bounds = ["+Inf" if math.isinf(bound) else f"{bound:g}" for bound in BOUNDS_SECONDS]
    family = HistogramMetricFamily(
        "pointsman_event_loop_lag_seconds",
        "How much later than asked the controller's event loop woke up, ten times a second.",
        labels=(),
    )
    below = list(zip(bounds, itertools.accumulate(lag.counts), strict=True))
    family.add_metric((), below, lag.total_seconds)
    return family


def _of_nodes(nodes: tuple[NodeView, ...]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "pointsman_node_state", "1 for the state that the node is in.", labels=("node", "state")
    )
    for node in nodes:
        for one in NodeState:
            state.add_metric((node.node_id, one.value), float(node.record.state is one))
    yield state
    ended: dict[tuple[str, ...], float] = {}
    for node in nodes:
        record = node.record
        ended[node.node_id, "completed"] = record.completed_requests
        ended[node.node_id, "failed"] = record.failed_requests
        ended[node.node_id, "cancelled"] = record.cancelled_requests
    yield _counter(
        "node_ended_requests",
        "Requests that ended at the node, and how; kept over restarts.",
        ("node", "outcome"),
        ended,
    )
    for name, text, of_node in _NODE_GAUGES:
        gauge = GaugeMetricFamily(f"pointsman_node_{name}", text, labels=("node",))
        for node in nodes:
            _add(gauge, (node.node_id,), of_node(node))
        yield gauge


def _of_health(read: Callable[[Health], float | None]) -> Callable[[NodeView], float | None]:
    def of_node(node: NodeView) -> float | None:
        health = node.record.health
        return None if health is None else read(health)

    return of_node


_NODE_GAUGES: Final[tuple[tuple[str, str, Callable[[NodeView], float | None]], ...]] = (
    (
        "inflight_requests",
        "Claims that have not ended.",
        lambda node: len(node.record.requests),
    ),
    (
        "backlog_seconds",
        "Predicted work ahead of a new batch.",
        lambda node: node.backlog_seconds,
    ),
    (
        "health_age_seconds",
        "Since the last health sample arrived.",
        lambda node: node.health_age_seconds,
    ),
    (
        "round_trip_seconds",
        "As measured by probes, smoothed.",
        lambda node: node.record.round_trip_seconds,
    ),
    (
        "round_trip_age_seconds",
        "Since the round trip was measured.",
        lambda node: node.round_trip_age_seconds,
    ),
    (
        "goodput_age_seconds",
        "Since the older direction's goodput was measured.",
        lambda node: node.goodput_age_seconds,
    ),
    (
        "cpu_utilisation_ratio",
        "0 to 1, by the last health sample.",
        _of_health(lambda health: health.cpu_utilisation_ratio),
    ),
    (
        "memory_available_bytes",
        "By the last health sample.",
        _of_health(lambda health: health.memory_available_bytes),
    ),
    (
        "temperature_celsius",
        "By the last health sample; absent where the board cannot tell.",
        _of_health(lambda health: health.temperature_celsius),
    ),
    (
        "power_watts",
        "By the last health sample; absent where the board cannot tell.",
        _of_health(lambda health: health.power_watts),
    ),
    (
        "is_throttled",
        "1 while the node says that it throttles; absent where the board cannot tell.",
        _of_health(lambda health: health.is_throttled),
    ),
)


def _of_models(nodes: tuple[NodeView, ...]) -> Iterator[Metric]:
    labels = ("node", "model")
    is_ready = GaugeMetricFamily(
        "pointsman_model_is_ready", "Whether the node can answer with it.", labels=labels
    )
    age = GaugeMetricFamily(
        "pointsman_model_speed_age_seconds",
        "Since its speed was measured again or moved by a completion; absent if never.",
        labels=labels,
    )
    rates = GaugeMetricFamily(
        "pointsman_model_tokens_per_second",
        "The speeds that predictions use: prefill, decode of one sequence, decode of all slots.",
        labels=(*labels, "phase"),
    )
    for node in nodes:
        for model, seconds in zip(node.models, node.speed_ages_seconds, strict=True):
            where = (node.node_id, model.name)
            is_ready.add_metric(where, float(node.record.is_routable(model)))
            _add(age, where, seconds)
            if model.calibration is not None:
                speeds = model.calibration
                rates.add_metric((*where, "prefill"), speeds.prefill_rate)
                rates.add_metric((*where, "decode"), speeds.decode_rate)
                rates.add_metric((*where, "saturated"), speeds.saturated_decode_rate)
    yield is_ready
    yield age
    yield rates


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"pointsman_{name}", text, labels=())
    _add(gauge, (), value)
    return gauge


def _add(gauge: GaugeMetricFamily, labels: tuple[str, ...], value: float | None) -> None:
    if value is not None:
        gauge.add_metric(labels, float(value))


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    counter = CounterMetricFamily(f"pointsman_{name}", text, labels=labels)
    for key, value in values.items():
        counter.add_metric(key, value)
    return counter
