"""What Prometheus reads of a controller."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from controller.routing.policy import FallbackCause

__all__ = ["CONTENT_TYPE", "ControllerMetrics", "CountsFallbacks"]


class CountsFallbacks(Protocol):
    """Where the counts come from; read anew at every scrape."""

    @property
    def policy_fallbacks(self) -> Mapping[tuple[str, FallbackCause], int]:
        """Requests that another policy decided, by the policy in force and the cause."""
        ...


class ControllerMetrics(Collector):
    """The metrics of one controller; a registry of its own, since tests run several."""

    def __init__(self, source: CountsFallbacks) -> None:
        self._source = source
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """As they stand now."""
        fallbacks = CounterMetricFamily(
            "pointsman_policy_fallback_requests",
            "Requests that another policy decided than the one in force.",
            labels=("policy", "cause"),
        )
        for (policy, cause), count in self._source.policy_fallbacks.items():
            fallbacks.add_metric((policy, cause.value), count)
        yield fallbacks

    def text(self) -> bytes:
        """In Prometheus' text format, for `CONTENT_TYPE`."""
        return generate_latest(self._registry)
