"""From counters and power samples to joules, and whose joules they were (pure).

A node's energy is kept as a row of short segments. A request that ends takes from the segments
of its active time what its work took; what nobody takes is idle energy. So the joules of all
requests plus the idle ones always equal the node's total.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from edge_agent.sensors.base import ESTIMATE

_HORIZON_SECONDS: Final = 1800.0
"""Segments are kept for this long: twice the longest default time limit of a request."""

_MIN_COVERED_RATIO: Final = 0.5
"""A request of which less than this share of its time is known is not charged at all."""

_MIN_MEASURED_RATIO: Final = 0.9
"""Below this share of one source, joules are called an estimate."""

_SETTLED: Final = 1e-9


class WrappingCounter:
    """A hardware counter that starts again at 0 after its own range.

    Args:
        range_units: greatest value plus one, in the counter's units.
        max_rate: units a second that this domain cannot exceed; a faster rise is no energy but
            a reset or a fault.
    """

    def __init__(self, range_units: int, max_rate: float) -> None:
        self._range = range_units
        self._max_rate = max_rate
        self._last: tuple[float, int] | None = None
        self.dropped = 0

    def advance(self, raw: int, now: float) -> int | None:
        """Units since the call before.

        None: the first call, which is a baseline; or a rise that cannot be, which is dropped and
        counted, and makes this reading the new baseline.
        """
        last, self._last = self._last, (now, raw)
        if last is None:
            return None
        seconds, rise = now - last[0], raw - last[1]
        if rise < 0:
            rise += self._range
        if rise < 0 or seconds <= 0 or rise > self._max_rate * seconds:
            self.dropped += 1
            return None
        return rise


@dataclass(frozen=True, slots=True)
class PowerSample:
    """What is known at one moment.

    Attributes:
        at: monotonic seconds.
        source: the sensor's name, or ESTIMATE.
        power_watts: None for the baseline of a counter.
        energy_joules: a counter; used instead of the power when both samples have one.
    """

    at: float
    source: str
    power_watts: float | None
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """What one request used.

    Attributes:
        joules: its share of the node's energy.
        source: of the greater part; ESTIMATE when no one source covers at least 90 % of it.
        prefill_joules: the part that reading the prompt took; the rest went into the answer.
    """

    joules: float
    source: str
    prefill_joules: float = 0.0

    @property
    def decode_joules(self) -> float:
        """The part that writing the answer took."""
        return self.joules - self.prefill_joules


@dataclass(frozen=True, slots=True)
class Work:
    """What one request had of an engine.

    Attributes:
        prefill_seconds: from the first prompt token to the first of the answer.
        decode_seconds: from there to the last token.
        work_seconds: its share of the engine's busy time.
        prefill_work_seconds: the part of it that the prompt took; None shares the work out by how
            busy the engine was in each phase.
    """

    prefill_seconds: float
    decode_seconds: float
    work_seconds: float
    prefill_work_seconds: float | None = None

    @property
    def prefill_share(self) -> float:
        """The prompt's part of the work, 0 to 1; by time where the work is not known apart."""
        if self.prefill_work_seconds is not None:
            part, whole = self.prefill_work_seconds, self.work_seconds
        else:
            part, whole = self.prefill_seconds, self.prefill_seconds + self.decode_seconds
        return min(1.0, part / whole) if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EnergyTotals:
    """A node's energy since the ledger began.

    `idle_joules` is what no finished request took: true idling, and what running requests have
    used so far. `requests_joules + idle_joules == total_joules`.
    """

    total_joules: float
    requests_joules: float
    idle_joules: float
    measured_seconds: float
    estimated_seconds: float


@dataclass(slots=True)
class _Segment:
    start: float
    end: float
    joules: float
    source: str
    # Requests that each engine had; shared between segments, never changed.
    active: Mapping[str, int]
    # Seconds of each engine's time that are given away already.
    taken: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def share(self, engine: str, seconds: float) -> float:
        """Joules of this much of an engine's time: busy engines share the node equally."""
        engines = max(1, len(self.active.keys() | {engine}))
        return self.joules * seconds / self.seconds / engines


class EnergyLedger:
    """The energy of one node, in segments, and who used it.

    Args:
        max_gap_seconds: longest interval between two power samples that is still measured; what
            lies in a longer one is an estimate.
    """

    def __init__(self, max_gap_seconds: float = 3.0) -> None:
        self._max_gap_seconds = max_gap_seconds
        self._segments: deque[_Segment] = deque()
        self._last: PowerSample | None = None
        self._until = 0.0
        self._active: Mapping[str, int] = {}
        self._integral_joules = 0.0
        self._total_joules = 0.0
        self._requests_joules = 0.0
        self._measured_seconds = 0.0
        self._estimated_seconds = 0.0

    def add(self, sample: PowerSample) -> None:
        """Take what a sensor or the power model says; samples come in the order of time."""
        last = self._last
        if last is not None and sample.at < last.at:
            sample = replace(sample, at=last.at)  # two threads may pass each other by microseconds
        self._last = sample
        if last is None:
            self._until = sample.at
            return
        joules, source = self._between(last, sample)
        self._integral_joules += joules
        # What `advance` has handed out beyond the true figure is taken back here.
        self._append(sample.at, self._integral_joules - self._total_joules, source)

    def advance(self, now: float) -> None:
        """Account for the time since the last sample with the power that it had."""
        last = self._last
        if last is None or last.power_watts is None or now <= self._until:
            return
        is_fresh = now - last.at <= self._max_gap_seconds
        source = last.source if is_fresh else ESTIMATE
        self._append(now, last.power_watts * (now - self._until), source)

    def set_active(self, active: Mapping[str, int], now: float) -> None:
        """From `now` on, these engines have this many requests each."""
        self.advance(now)
        self._active = {engine: count for engine, count in active.items() if count}

    def charge(self, engine: str, end: float, work: Work) -> Charge | None:
        """Take the energy of one request that ended, once.

        Its work is spread over its active time as an engine shares its time: evenly over the
        requests it has, and never more than what is left of a segment. Work is therefore exact,
        and where in the window it was done is the estimate. What the prompt took is looked for
        while the prompt was read, and the rest while the answer was written.

        Args:
            engine: the one that served it, as in `set_active`.
            end: when its last token was decoded, monotonic seconds.

        Returns:
            None when the energy of its time is not known.
        """
        self.advance(end)
        border = end - work.decode_seconds
        start = border - work.prefill_seconds
        pieces = self._pieces(engine, start, end)
        covered = sum(piece.seconds for piece in pieces)
        if covered <= 0 or covered < _MIN_COVERED_RATIO * (end - start):
            return None
        reading = self._pieces(engine, start, border)
        prefill_work = work.prefill_work_seconds
        if prefill_work is None:
            weights = sum(piece.weight for piece in pieces)
            read = sum(piece.weight for piece in reading)
            prefill_work = work.work_seconds * (read / weights if weights > 0 else 0.0)
        prefill_work = min(prefill_work, work.work_seconds)
        prefill_joules, unplaced = self._take(engine, prefill_work, reading)
        decode_work = work.work_seconds - prefill_work
        decode_joules, left = self._take(engine, decode_work, self._pieces(engine, border, end))
        # What found no room in its own phase was done in the other one, a little off the border.
        more, _ = self._take(engine, unplaced, self._pieces(engine, start, end))
        rest, _ = self._take(engine, left, self._pieces(engine, start, end))
        prefill_joules += more
        joules = prefill_joules + decode_joules + rest
        self._requests_joules += joules
        by_source: dict[str, float] = {}
        for piece in pieces:
            known = piece.segment.source
            by_source[known] = by_source.get(known, 0.0) + piece.seconds
        source = max(by_source, key=lambda known: by_source[known])
        if by_source[source] < _MIN_MEASURED_RATIO * covered:
            source = ESTIMATE
        return Charge(joules, source, prefill_joules)

    def _pieces(self, engine: str, start: float, end: float) -> list["_Piece"]:
        """What of each segment lies between two moments, the latest first."""
        pieces = []
        for segment in reversed(self._segments):
            if segment.end <= start:
                break
            overlap = min(end, segment.end) - max(start, segment.start)
            if overlap > 0:
                free = min(overlap, segment.seconds - segment.taken.get(engine, 0.0))
                weight = overlap / max(1, segment.active.get(engine, 1))
                pieces.append(_Piece(segment, overlap, free, weight))
        return pieces

    def _take(
        self, engine: str, work_seconds: float, pieces: list["_Piece"]
    ) -> tuple[float, float]:
        """Joules of this much work done in these pieces, and the seconds that found no room."""
        joules, placed = 0.0, 0.0
        if work_seconds <= _SETTLED:
            return 0.0, 0.0
        for piece, seconds in zip(pieces, _spread(work_seconds, pieces), strict=True):
            segment = piece.segment
            segment.taken[engine] = segment.taken.get(engine, 0.0) + seconds
            joules += segment.share(engine, seconds)
            placed += seconds
        return joules, max(0.0, work_seconds - placed)

    def totals(self, now: float) -> EnergyTotals:
        """The sums up to `now`."""
        self.advance(now)
        return EnergyTotals(
            total_joules=self._total_joules,
            requests_joules=self._requests_joules,
            idle_joules=self._total_joules - self._requests_joules,
            measured_seconds=self._measured_seconds,
            estimated_seconds=self._estimated_seconds,
        )

    def _between(self, last: PowerSample, sample: PowerSample) -> tuple[float, str]:
        seconds = max(0.0, sample.at - last.at)
        before, after = last.power_watts, sample.power_watts
        is_same = last.source == sample.source
        if is_same and last.energy_joules is not None and sample.energy_joules is not None:
            return max(0.0, sample.energy_joules - last.energy_joules), sample.source
        if last.source == ESTIMATE or after is None:
            return (before or 0.0) * seconds, last.source  # it said when it changed
        if before is None:
            return after * seconds, sample.source
        is_measured = is_same and seconds <= self._max_gap_seconds
        source = sample.source if is_measured else ESTIMATE
        return (before + after) / 2.0 * seconds, source  # the trapezoid rule

    def _append(self, until: float, joules: float, source: str) -> None:
        seconds = until - self._until
        if seconds <= 0:
            return
        joules = max(0.0, joules)
        self._segments.append(_Segment(self._until, until, joules, source, self._active))
        self._until = until
        self._total_joules += joules
        if source == ESTIMATE:
            self._estimated_seconds += seconds
        else:
            self._measured_seconds += seconds
        while self._segments[0].end < until - _HORIZON_SECONDS:
            self._segments.popleft()


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a segment that a request was active in.

    Attributes:
        free: seconds of the engine's time in it that nobody has taken.
        weight: how much of the engine's time one request could have had in it.
    """

    segment: _Segment
    seconds: float
    free: float
    weight: float


def _spread(work_seconds: float, pieces: list[_Piece]) -> list[float]:
    """Give each piece its part of the work, by weight and never above what is free in it."""
    given = [0.0] * len(pieces)
    is_open = [piece.free > _SETTLED for piece in pieces]
    left = work_seconds
    # Each pass fills at least one piece or ends, and a few passes settle nearly all of it.
    for _ in range(16):
        weight = sum(
            piece.weight for piece, is_left in zip(pieces, is_open, strict=True) if is_left
        )
        if left <= _SETTLED or weight <= 0:
            break
        scale, left = left / weight, 0.0
        for index, piece in enumerate(pieces):
            if not is_open[index]:
                continue
            wanted = given[index] + scale * piece.weight
            if wanted >= piece.free:
                left += wanted - piece.free
                wanted, is_open[index] = piece.free, False
            given[index] = wanted
    return given
