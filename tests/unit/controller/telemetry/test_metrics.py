import pytest

from controller.telemetry.loop_lag import LoopLag
from controller.telemetry.metrics import Described, Metrics, Summed
from tests.fakes.scraped import scraped


def test_every_scrape_reads_the_owner_again() -> None:
    counts = {}
    metrics = Metrics()
    metrics.counter("falls", "Falls, by policy and cause.", lambda: counts, ("policy", "cause"))
    key = 'falls_total{cause=late,policy=od"d}'
    assert key not in scraped(metrics)
    counts['od"d', "late"] = 3.0
    assert scraped(metrics)[key] == 3.0
    counts['od"d', "late"] = 4.0
    assert scraped(metrics)[key] == 4.0


def test_what_is_unknown_has_no_sample() -> None:
    """A 0 would be a lie."""
    metrics = Metrics()
    metrics.gauge("heat", "Heat.", lambda: None)
    metrics.gauge("power", "Power.", lambda: {("a",): None, ("b",): 2}, ("node",))
    assert scraped(metrics) == {"power{node=b}": 2.0}


def test_summary_is_a_count_and_a_sum() -> None:
    metrics = Metrics()
    metrics.summary("wait_seconds", "Waits.", lambda: {("a",): Summed(3, 0.6)}, ("queue",))
    assert scraped(metrics) == {
        "wait_seconds_count{queue=a}": 3.0,
        "wait_seconds_sum{queue=a}": 0.6,
    }


def test_lag_of_the_loop_is_a_histogram_of_all_wakings() -> None:
    lag, metrics = LoopLag(), Metrics()
    lag.register_metrics(metrics)
    for seconds in (0.0, 0.004, 0.05, 0.3, 7.0):
        lag.observe(seconds)
    found = scraped(metrics)
    buckets = {
        bound: found[f"event_loop_lag_seconds_bucket{{le={bound}}}"]
        for bound in ("0.001", "0.005", "0.01", "0.05", "0.1", "0.5", "1", "+Inf")
    }
    assert list(buckets.values()) == [1, 2, 2, 3, 3, 4, 4, 5]
    assert found["event_loop_lag_seconds_count{}"] == 5
    assert found["event_loop_lag_seconds_sum{}"] == pytest.approx(7.354)


def test_name_is_registered_once() -> None:
    metrics = Metrics()
    metrics.gauge("load", "Load.", lambda: 1)
    with pytest.raises(ValueError, match="'load' is registered twice"):
        metrics.counter("load", "Load.", lambda: 1)


@pytest.mark.parametrize("values", [(), ("a", "b")])
def test_value_with_other_labels_than_its_metric_is_an_error(values: tuple[str, ...]) -> None:
    metrics = Metrics()
    metrics.gauge("load", "Load.", lambda: {values: 1.0}, ("node",))
    with pytest.raises(ValueError, match="pointsman_load"):
        metrics.text()


def test_metrics_are_described_with_the_name_that_prometheus_stores() -> None:
    metrics = Metrics()
    metrics.gauge("load", "Load.", dict, ("node",))
    metrics.counter("falls", "Falls.", dict)
    assert metrics.described == [
        Described("pointsman_falls_total", "counter", (), "Falls."),
        Described("pointsman_load", "gauge", ("node",), "Load."),
    ]
