from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from controller.routing.policy import FallbackCause
from controller.telemetry.metrics import ControllerMetrics


class Counts:
    """A controller of which only its fall-backs are known."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, FallbackCause], int] = {}

    @property
    def policy_fallbacks(self) -> Mapping[tuple[str, FallbackCause], int]:
        return self.counts


def read(metrics: ControllerMetrics) -> dict[tuple[str, ...], float]:
    """Every sample as Prometheus understands it, by name, policy and cause."""
    return {
        (sample.name, sample.labels["policy"], sample.labels["cause"]): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_every_scrape_reads_the_counts_anew() -> None:
    counts = Counts()
    metrics = ControllerMetrics(counts)
    assert read(metrics) == {}
    cause = next(iter(FallbackCause))
    counts.counts[('od"d', cause)] = 3
    key = ("pointsman_policy_fallback_requests_total", 'od"d', cause.value)
    assert read(metrics) == {key: 3.0}
    counts.counts['od"d', cause] = 4
    assert read(metrics) == {key: 4.0}


def test_one_policy_may_leave_requests_for_several_causes() -> None:
    counts = Counts()
    counts.counts = {("ppo", cause): number for number, cause in enumerate(FallbackCause, 1)}
    name = "pointsman_policy_fallback_requests_total"
    assert read(ControllerMetrics(counts)) == {
        (name, "ppo", cause.value): number for number, cause in enumerate(FallbackCause, 1)
    }
