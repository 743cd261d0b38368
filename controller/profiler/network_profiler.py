"""The path between the controller and each node: round trip and goodput, with their age.

Pure. An empty probe measures the round trip. A probe that carries padding, or whose echo does,
comes back later by the time those bytes took, which is the goodput of that direction. Such probes
go only over links that are idle and not metered, and are sized to last about 40 ms, so that nobody
notices. Prompts and streamed answers are not used: their bytes wait for the engine, not the link.

What was measured loses weight as it ages, and the prior takes over: after `FRESH_SECONDS` half of
the difference (in log space) goes every `HALF_LIFE_SECONDS`.
"""

import math
from dataclasses import dataclass
from typing import Final

from controller.domain.cluster import NetworkPath, NodeKind

DEFAULT_ROUND_TRIP_SECONDS: Final = {NodeKind.EDGE: 0.01, NodeKind.CLOUD: 0.05}
"""Before the first probe; the paper's Table II has 5-8 ms at the edge and 40-60 ms in the cloud."""

DEFAULT_BITS_PER_SECOND: Final = 50e6
"""Goodput assumed of a path nobody has measured; prompts are a few kilobytes."""

FRESH_SECONDS: Final = 600.0
HALF_LIFE_SECONDS: Final = 1800.0

LEAST_PROBE_BYTES: Final = 4096
GREATEST_PROBE_BYTES: Final = 1 << 20
"""The wire's own limit for an echo."""

_TARGET_SECONDS: Final = 0.04
_TOO_SHORT_SECONDS: Final = 0.004
"""A difference this small is mostly jitter: the probe grows until it is longer."""

_SHORTEST_SECONDS: Final = 0.0005
_GREATEST_GROWTH: Final = 4.0
_ROUND_TRIP_WEIGHT: Final = 0.25
_GOODPUT_WEIGHT: Final = 0.5


@dataclass(frozen=True, slots=True)
class ProbeSize:
    """What a probe carries: to the node, and back; at most one of them is not 0."""

    padding_bytes: int = 0
    echo_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether it measures the round trip."""
        return not self.padding_bytes and not self.echo_bytes


EMPTY_PROBE: Final = ProbeSize()


class _Goodput:
    """One direction; `bits_per_second` is None until measured."""

    def __init__(self) -> None:
        self.bits_per_second: float | None = None
        self.measured_at = -math.inf
        self.next_bytes = LEAST_PROBE_BYTES

    def observe(self, size_bytes: int, extra_seconds: float, now: float) -> None:
        seconds = max(extra_seconds, _SHORTEST_SECONDS)
        rate = 8.0 * size_bytes / seconds
        self.next_bytes = _next_size(size_bytes, seconds)
        old = self.bits_per_second
        is_jitter = seconds < _TOO_SHORT_SECONDS and self.next_bytes > size_bytes
        if is_jitter and old is not None and rate < old:
            return  # the greater probe that follows will tell
        # The first of a new, much greater size says more than all the small ones before.
        weight = 1.0 if old is None or rate > _GREATEST_GROWTH * old else _GOODPUT_WEIGHT
        self.bits_per_second = rate if old is None else old * (rate / old) ** weight
        self.measured_at = now

    def believed(self, now: float) -> float:
        if self.bits_per_second is None:
            return DEFAULT_BITS_PER_SECOND
        return _aged(self.bits_per_second, DEFAULT_BITS_PER_SECOND, now - self.measured_at)


def _next_size(size_bytes: int, seconds: float) -> int:
    wanted = size_bytes * min(_TARGET_SECONDS / seconds, _GREATEST_GROWTH)
    return int(min(max(wanted, LEAST_PROBE_BYTES), GREATEST_PROBE_BYTES))


def _aged(measured: float, prior: float, age_seconds: float) -> float:
    weight = 0.5 ** (max(age_seconds - FRESH_SECONDS, 0.0) / HALF_LIFE_SECONDS)
    return prior * math.exp(weight * math.log(measured / prior))


class PathEstimate:
    """What is known of the path to one node.

    Args:
        is_metered: nothing is sent merely to measure goodput.
    """

    def __init__(self, kind: NodeKind, is_metered: bool) -> None:
        self._kind = kind
        self._is_metered = is_metered
        self.round_trip_seconds: float | None = None
        self._round_trip_at = -math.inf
        self._receive, self._transmit = _Goodput(), _Goodput()
        self._next_is_receive = True
        self._sized_probe_at = -math.inf

    def probed(self, size: ProbeSize, seconds: float, now: float) -> None:
        """A probe came back after so many seconds."""
        seconds = max(seconds, 0.0)
        if size.is_empty:
            old = self.round_trip_seconds
            self.round_trip_seconds = (
                seconds if old is None else old + _ROUND_TRIP_WEIGHT * (seconds - old)
            )
            self._round_trip_at = now
            return
        if self.round_trip_seconds is None:
            return
        direction, size_bytes = (
            (self._receive, size.padding_bytes)
            if size.padding_bytes
            else (self._transmit, size.echo_bytes)
        )
        direction.observe(size_bytes, seconds - self.round_trip_seconds, now)

    def next_probe(self, is_idle: bool, interval_seconds: float, now: float) -> ProbeSize:
        """What the next probe may carry.

        Args:
            is_idle: nothing else is on its way to or from the node.
            interval_seconds: between two probes that carry something; at the start they follow
                at once until the size has settled.
        """
        is_allowed = is_idle and not self._is_metered and self.round_trip_seconds is not None
        if not is_allowed or now - self._sized_probe_at < self._wait(interval_seconds):
            return ProbeSize()
        self._sized_probe_at = now
        self._next_is_receive = not self._next_is_receive
        if self._next_is_receive:
            return ProbeSize(echo_bytes=self._transmit.next_bytes)
        return ProbeSize(padding_bytes=self._receive.next_bytes)

    def _wait(self, interval_seconds: float) -> float:
        unknown = None in (self._receive.bits_per_second, self._transmit.bits_per_second)
        return 0.0 if unknown else interval_seconds

    @property
    def receive_bytes_per_second(self) -> float | None:
        """Measured goodput to the node; None until measured."""
        rate = self._receive.bits_per_second
        return None if rate is None else rate / 8.0

    @property
    def transmit_bytes_per_second(self) -> float | None:
        """Measured goodput from the node; None until measured."""
        rate = self._transmit.bits_per_second
        return None if rate is None else rate / 8.0

    def round_trip_age_seconds(self, now: float) -> float | None:
        """Time since the round trip was measured; None if never."""
        return None if self.round_trip_seconds is None else now - self._round_trip_at

    def goodput_age_seconds(self, now: float) -> float | None:
        """Time since the older of the two directions was measured; None until both were."""
        age = now - min(self._receive.measured_at, self._transmit.measured_at)
        return age if math.isfinite(age) else None

    def path(self, now: float) -> NetworkPath:
        """The path to predict with; directions are the node's."""
        prior = DEFAULT_ROUND_TRIP_SECONDS[self._kind]
        round_trip = prior
        if self.round_trip_seconds is not None:
            measured = max(self.round_trip_seconds, 1e-6)
            round_trip = _aged(measured, prior, now - self._round_trip_at)
        return NetworkPath(round_trip, self._receive.believed(now), self._transmit.believed(now))
