"""The metrics of nodes and of the models on them, read from what routing uses."""

import time
from collections.abc import Callable
from typing import Final

from controller.domain.cluster import NodeState
from controller.domain.node_report import Health, ReportedModel, SensorState
from controller.ids import NodeId
from controller.profiler.state import NodeRecord, ProfilerState
from controller.telemetry.metrics import LabelValues, Metrics

_OfNode = Callable[[NodeRecord, float], float | None]
"""(record, now in monotonic seconds) -> the value; None while it is unknown."""


def register_node_metrics(metrics: Metrics, profiler: ProfilerState) -> None:
    """Register what the profiler knows of each node and model."""
    metrics.counter(
        "profiler_events",
        "Events taken in by the profiler, by kind: health samples, streamed tokens, claims, ends.",
        lambda: {(kind,): count for kind, count in profiler.events.items()},
        ("event",),
    )
    metrics.gauge(
        "node_state",
        "1 for the state that the node is in, 0 for the others.",
        lambda: {
            (node_id, state.value): float(record.state is state)
            for node_id, record in _nodes(profiler)
            for state in NodeState
        },
        ("node", "state"),
    )
    metrics.counter(
        "node_ended_requests",
        "Requests that ended at the node, by outcome. Kept over restarts of the controller.",
        lambda: {
            (node_id, outcome): count
            for node_id, record in _nodes(profiler)
            for outcome, count in (
                ("completed", record.completed_requests),
                ("failed", record.failed_requests),
                ("cancelled", record.cancelled_requests),
            )
        },
        ("node", "outcome"),
    )
    for name, text, of_node in _NODE_GAUGES:
        metrics.gauge(name, text, _by_node(profiler, of_node), ("node",))
    for name, text, of_sensor in _SENSOR_GAUGES:
        metrics.gauge(name, text, _by_sensor(profiler, of_sensor), ("node", "sensor"))
    metrics.gauge(
        "model_is_ready",
        "1 if the node can answer with the model.",
        _by_model(profiler, lambda record, model, now: float(record.is_routable(model))),
        ("node", "model"),
    )
    metrics.gauge(
        "model_speed_age_seconds",
        "Time since the model's speed was measured or changed by a completion. No sample: never.",
        _by_model(profiler, NodeRecord.speed_age_seconds),
        ("node", "model"),
    )
    metrics.gauge(
        "model_tokens_per_second",
        "Speeds that predictions use: `prefill`, `decode` of one sequence, `saturated` decode of "
        "all slots.",
        lambda: {
            (node_id, model.name, phase): rate
            for node_id, record in _nodes(profiler)
            for model in record.models
            if (speeds := record.calibration_of(model)) is not None
            for phase, rate in (
                ("prefill", speeds.prefill_tokens_per_second),
                ("decode", speeds.decode_tokens_per_second),
                ("saturated", speeds.saturated_decode_tokens_per_second),
            )
        },
        ("node", "model", "phase"),
    )


def _nodes(profiler: ProfilerState) -> list[tuple[NodeId, NodeRecord]]:
    return sorted(profiler.nodes.items())


def _by_node(
    profiler: ProfilerState, of_node: _OfNode
) -> Callable[[], dict[LabelValues, float | None]]:
    def read() -> dict[LabelValues, float | None]:
        now = time.monotonic()
        return {(node_id,): of_node(record, now) for node_id, record in _nodes(profiler)}

    return read


def _by_sensor(
    profiler: ProfilerState, of_sensor: Callable[[SensorState], float]
) -> Callable[[], dict[LabelValues, float | None]]:
    def read() -> dict[LabelValues, float | None]:
        return {
            (node_id, sensor.name): of_sensor(sensor)
            for node_id, record in _nodes(profiler)
            if record.health is not None
            for sensor in record.health.sensors
        }

    return read


def _by_model(
    profiler: ProfilerState,
    of_model: Callable[[NodeRecord, ReportedModel, float], float | None],
) -> Callable[[], dict[LabelValues, float | None]]:
    def read() -> dict[LabelValues, float | None]:
        now = time.monotonic()
        return {
            (node_id, model.name): of_model(record, model, now)
            for node_id, record in _nodes(profiler)
            for model in record.models
        }

    return read


def _of_health(read: Callable[[Health], float | None]) -> _OfNode:
    return lambda record, now: None if record.health is None else read(record.health)


_SENSOR_GAUGES: Final[tuple[tuple[str, str, Callable[[SensorState], float]], ...]] = (
    (
        "node_sensor_is_working",
        "1 if the sensor's last reading succeeded, 0 if it failed and can be mended.",
        lambda sensor: sensor.is_working,
    ),
    (
        "node_sensor_read_seconds",
        "Duration of the sensor's last reading.",
        lambda sensor: sensor.read_seconds,
    ),
)

_NODE_GAUGES: Final[tuple[tuple[str, str, _OfNode], ...]] = (
    (
        "node_inflight_requests",
        "Requests claimed for the node that have not ended.",
        lambda record, now: len(record.requests),
    ),
    (
        "node_backlog_seconds",
        "Predicted work ahead of a new batch.",
        lambda record, now: record.requests.backlog_seconds(now),
    ),
    (
        "node_health_age_seconds",
        "Time since the last health sample arrived.",
        lambda record, now: record.health_age_seconds(now),
    ),
    (
        "node_round_trip_seconds",
        "Round trip measured by probes, smoothed.",
        lambda record, now: record.round_trip_seconds,
    ),
    (
        "node_round_trip_age_seconds",
        "Time since the round trip was measured.",
        lambda record, now: record.path.round_trip_age_seconds(now),
    ),
    (
        "node_goodput_age_seconds",
        "Time since goodput was measured; of the two directions, the older one.",
        lambda record, now: record.path.goodput_age_seconds(now),
    ),
    (
        "node_cpu_utilisation_ratio",
        "CPU utilisation in the last health sample, 0 to 1.",
        _of_health(lambda health: health.cpu_utilisation_ratio),
    ),
    (
        "node_memory_available_bytes",
        "Available memory in the last health sample.",
        _of_health(lambda health: health.memory_available_bytes),
    ),
    (
        "node_temperature_celsius",
        "Temperature in the last health sample. No sample: the board has no sensor.",
        _of_health(lambda health: health.temperature_celsius),
    ),
    (
        "node_power_watts",
        "Power of the board in the last health sample. No sample: unknown.",
        _of_health(lambda health: health.power_watts),
    ),
    (
        "node_is_throttled",
        "1 while the node reports that it throttles. No sample: the board cannot tell.",
        _of_health(lambda health: health.is_throttled),
    ),
)
