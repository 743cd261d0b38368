"""The metrics of one controller: each owner registers what it knows and how to read it."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
"""Of `Metrics.text`."""

_PREFIX: Final = "pointsman_"

LabelValues = tuple[str, ...]
"""In the order of the metric's labels."""

Value = float | None | Mapping[LabelValues, float | None]
"""One number, or one for each set of label values. None is unknown, and has no sample."""


@dataclass(frozen=True, slots=True)
class Summed:
    """How often something happened, and the sum of what was measured each time."""

    count: int
    total: float


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram.

    Attributes:
        bounds: upper bound of each bucket, rising; the last is infinite.
        counts: of each bucket, without those below it.
        total: sum of everything observed.
    """

    bounds: Sequence[float]
    counts: Sequence[float]
    total: float


@dataclass(frozen=True, slots=True)
class Described:
    """A metric as the reference page lists it.

    Attributes:
        name: as Prometheus stores it, with prefix, and with `_total` of a counter.
        kind: "gauge", "counter", "summary" or "histogram".
        labels: names; the bound `le` of a histogram is not among them.
        text: one sentence.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Metrics(Collector):
    """What owners have registered, read at every scrape and never in between.

    One object for each controller, since tests run several in one process. The `read` functions are
    called in the event loop's thread and must be quick.

    The four methods that register share their first arguments:
        name: without `pointsman_`, and without `_total` for a counter; used once.
        text: one sentence that says what the metric means.
        read: gives the values as they stand now.
        labels: names; the values that `read` gives are keyed in this order.

    Raises:
        ValueError: a name is registered twice, or a value has not as many labels as its metric.
    """

    def __init__(self) -> None:
        self._described: dict[str, Described] = {}
        self._families: list[Callable[[], Metric]] = []
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def gauge(
        self, name: str, text: str, read: Callable[[], Value], labels: tuple[str, ...] = ()
    ) -> None:
        """Register a value that goes up and down; see the class for the arguments."""
        full_name = self._add(name, "gauge", text, labels)

        def family() -> Metric:
            gauge = GaugeMetricFamily(full_name, text, labels=labels)
            for values, value in _known(full_name, labels, read()):
                gauge.add_metric(values, value)
            return gauge

        self._families.append(family)

    def counter(
        self, name: str, text: str, read: Callable[[], Value], labels: tuple[str, ...] = ()
    ) -> None:
        """Register a count that only rises; see the class for the arguments."""
        full_name = self._add(name, "counter", text, labels)

        def family() -> Metric:
            counter = CounterMetricFamily(full_name, text, labels=labels)
            for values, value in _known(full_name, labels, read()):
                counter.add_metric(values, value)
            return counter

        self._families.append(family)

    def summary(
        self,
        name: str,
        text: str,
        read: Callable[[], Mapping[LabelValues, Summed]],
        labels: tuple[str, ...] = (),
    ) -> None:
        """Register counts with their sums; see the class for the arguments."""
        full_name = self._add(name, "summary", text, labels)

        def family() -> Metric:
            summary = SummaryMetricFamily(full_name, text, labels=labels)
            for values, summed in read().items():
                _check(full_name, labels, values)
                summary.add_metric(values, summed.count, summed.total)
            return summary

        self._families.append(family)

    def histogram(self, name: str, text: str, read: Callable[[], Buckets]) -> None:
        """Register a histogram without labels; see the class for the arguments."""
        full_name = self._add(name, "histogram", text, ())

        def family() -> Metric:
            histogram = HistogramMetricFamily(full_name, text, labels=())
            found = read()
            bounds = ["+Inf" if math.isinf(bound) else f"{bound:g}" for bound in found.bounds]
            below = list(zip(bounds, itertools.accumulate(found.counts), strict=True))
            histogram.add_metric((), below, found.total)
            return histogram

        self._families.append(family)

    @property
    def described(self) -> list[Described]:
        """Everything that is registered, in order of name."""
        return [self._described[name] for name in sorted(self._described)]

    def collect(self) -> Iterator[Metric]:
        """Everything as it stands now."""
        for family in self._families:
            yield family()

    def text(self) -> bytes:
        """Everything as it stands now, in Prometheus' text format, for `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def _add(self, name: str, kind: str, text: str, labels: tuple[str, ...]) -> str:
        if name in self._described:
            raise ValueError(f"metric {name!r} is registered twice")
        full_name = _PREFIX + name
        listed = f"{full_name}_total" if kind == "counter" else full_name
        self._described[name] = Described(listed, kind, labels, text)
        return full_name


def _known(name: str, labels: tuple[str, ...], value: Value) -> Iterator[tuple[LabelValues, float]]:
    values = value if isinstance(value, Mapping) else {(): value}
    for key, one in values.items():
        _check(name, labels, key)
        if one is not None:
            yield key, float(one)


def _check(name: str, labels: tuple[str, ...], values: LabelValues) -> None:
    if len(values) != len(labels):
        raise ValueError(f"metric {name!r} has labels {labels}, not the values {values}")
