"""Work in flight at one node, by the controller's own dispatch and completion records.

The paper (III-B) has B <- max(0, B - elapsed) + newly assigned service time; `PaperBacklog` keeps
it like this. Ours corrects it: a request's share shrinks with the tokens it has streamed, and is
gone when it completes, so B is 0 exactly when nothing is in flight. Shares are counted at the
saturated rate, which is what a batching engine needs for them when more is on its way.

The same records say what a completion teaches of the engine's speed: how many sequences decoded
at once while it decoded, how many prompt seconds of others were in between, and how many other
models of the node were busy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from controller.domain.cluster import InFlightWork
from controller.ids import ModelName, RequestId

_LEAST: Final[Mapping[str, float]] = {
    "work_seconds": 0.0,
    "expected_tokens": 1.0,
    "prefill_seconds": 0.0,
    "prompt_tokens": 0.0,
    "max_tokens": 0,
}


@dataclass(frozen=True, slots=True)
class Claim:
    """What is predicted of a request when it is claimed for a node.

    Attributes:
        work_seconds: executor seconds at the saturated rate, the prompt's included.
        expected_tokens: length of the answer.
        prefill_seconds: the prompt's share of work_seconds.
        prompt_tokens: that have to be read.
        max_tokens: the answer cannot be longer; 0 for no limit.

    What cannot be is taken for the least that can: no time or number is negative, and an answer has
    at least one token.
    """

    model: ModelName
    work_seconds: float
    expected_tokens: float
    prefill_seconds: float = 0.0
    prompt_tokens: float = 0.0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                object.__setattr__(self, name, least)


@dataclass(frozen=True, slots=True)
class PrefillSeen:
    """Prompts that an engine read, without others of its own in between.

    Attributes:
        mean_decoding: answers that it wrote meanwhile, on average.
        mean_busy_models: models of the node that were busy meanwhile, this one included.
    """

    model: ModelName
    tokens: float
    seconds: float
    mean_decoding: float
    mean_busy_models: float


@dataclass(frozen=True, slots=True)
class DecodeSeen:
    """The company in which one answer was written.

    Attributes:
        mean_sequences: written at once on average, this one included.
        prefill_ratio: share of the time that the engine read prompts of others, by prediction.
        was_alone_in_prefill: no other prompt was waiting or being read from this one's dispatch to
            its first token, so that the node's own prefill seconds are the engine's.
        decoding_in_prefill: answers that were written meanwhile, on average.
        mean_busy_models, prefill_busy_models: models of the node that were busy while it was
            decoded, and from its dispatch to its first token; this one included.
    """

    model: ModelName
    mean_sequences: float
    prefill_ratio: float
    was_alone_in_prefill: bool
    decoding_in_prefill: float
    mean_busy_models: float
    prefill_busy_models: float


@dataclass(slots=True)
class _Entry:
    claim: Claim
    dispatched_at: float
    streamed_tokens: int = 0
    first_token_at: float | None = None
    was_alone: bool = True
    # Integrals as they stood at dispatch, and at the first token.
    decoding_at_dispatch: float = 0.0
    busy_at_dispatch: float = 0.0
    decoding_at_first: float = 0.0
    prefill_at_first: float = 0.0
    busy_at_first: float = 0.0
    decoding_in_prefill: float = 0.0
    prefill_busy_models: float = 1.0

    @property
    def is_reading(self) -> bool:
        return self.first_token_at is None

    def remaining_seconds(self) -> float:
        """Work that its streamed tokens have not yet paid for.

        An answer that outgrows its prediction keeps a tenth of its work until it ends: it is
        still there, and nobody knows for how long.
        """
        claim = self.claim
        writing = max(claim.work_seconds - claim.prefill_seconds, 0.0)
        reading = min(claim.prefill_seconds, claim.work_seconds) if self.is_reading else 0.0
        return reading + writing * (1.0 - min(self.streamed_tokens / self._expected(), 0.9))

    def remaining_tokens(self) -> float:
        expected = self._expected()
        left = max(expected - self.streamed_tokens, 0.1 * expected)
        if self.claim.max_tokens:
            left = min(left, float(self.claim.max_tokens - self.streamed_tokens))
        return max(left, 0.0)

    def _expected(self) -> float:
        return max(self.claim.expected_tokens, 1.0)


@dataclass(slots=True)
class _Engine:
    """One model of the node: who reads and who writes, and the integrals of both over time."""

    reading: int = 0
    decoding: int = 0
    heard_at: float = 0.0  # of its last token or end, or since when it has something to do
    decoding_seconds: float = 0.0
    prefill_seconds: float = 0.0
    # The prompts that are being read together, until none is.
    group_at: float = 0.0
    group_tokens: float = 0.0
    group_size: int = 0
    group_decoding: float = 0.0
    group_busy: float = 0.0
    is_group_whole: bool = True

    @property
    def is_busy(self) -> bool:
        return self.reading + self.decoding > 0


@dataclass(slots=True)
class PaperBacklog:
    """The paper's rule, for comparison: it hears of dispatches alone."""

    seconds: float = 0.0
    _at: float | None = None

    def assigned(self, service_seconds: float, now: float) -> None:
        """A request of this service time was sent."""
        self.seconds = self.at(now) + max(service_seconds, 0.0)
        self._at = now

    def at(self, now: float) -> float:
        """B at this moment."""
        elapsed = 0.0 if self._at is None else max(now - self._at, 0.0)
        return max(self.seconds - elapsed, 0.0)


@dataclass(slots=True)
class RequestMonitor:
    """The in-flight view of one node; owned by the profiler's state."""

    paper: PaperBacklog = field(default_factory=PaperBacklog)
    _in_flight: dict[RequestId, _Entry] = field(default_factory=dict)
    _engines: dict[ModelName, _Engine] = field(default_factory=dict)
    _busy_seconds: float = 0.0
    _at: float = 0.0
    # The last token or end, or the last claim since; and the seconds of work between the two.
    _heard_at: float = 0.0
    _silent_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self._in_flight)

    def dispatched(self, request_id: RequestId, claim: Claim, now: float) -> None:
        """Record a claim, at decision time, before the order leaves.

        A second claim of the same request takes the place of the first.
        """
        self.ended(request_id, now)
        self._advance(now)
        self.paper.assigned(claim.work_seconds, now)
        self._silent_seconds = self._worked_seconds(self._remaining_seconds(), now)
        self._heard_at = now
        engine = self._engines.setdefault(claim.model, _Engine())
        if not engine.is_busy:
            engine.heard_at = now
        if not engine.reading:
            engine.group_at, engine.group_tokens, engine.group_size = now, 0.0, 0
            engine.group_decoding = engine.decoding_seconds
            engine.group_busy, engine.is_group_whole = self._busy_seconds, True
        else:
            for entry in self._in_flight.values():
                if entry.is_reading and entry.claim.model == claim.model:
                    entry.was_alone = False
        self._in_flight[request_id] = _Entry(
            claim,
            now,
            was_alone=not engine.reading,
            decoding_at_dispatch=engine.decoding_seconds,
            busy_at_dispatch=self._busy_seconds,
        )
        engine.reading += 1
        engine.group_tokens += claim.prompt_tokens
        engine.group_size += 1

    def progressed(self, request_id: RequestId, tokens: int, now: float) -> PrefillSeen | None:
        """Record streamed tokens; unknown requests are ignored, since events may cross.

        Returns:
            what was seen of prompts that were read together, once the last of them has been.
        """
        entry = self._in_flight.get(request_id)
        if entry is None or tokens <= 0:  # a sign of life without tokens pays for nothing
            return None
        self._advance(now)
        entry.streamed_tokens += tokens
        self._heard(entry.claim.model, now)
        return self._first_token(entry, now) if entry.is_reading else None

    def _first_token(self, entry: _Entry, now: float) -> PrefillSeen | None:
        engine = self._engines[entry.claim.model]
        engine.reading -= 1
        engine.decoding += 1
        engine.prefill_seconds += max(entry.claim.prefill_seconds, 0.0)
        seconds = now - entry.dispatched_at
        entry.decoding_in_prefill = _mean(
            engine.decoding_seconds - entry.decoding_at_dispatch, seconds, 0.0
        )
        entry.prefill_busy_models = _mean(self._busy_seconds - entry.busy_at_dispatch, seconds, 1.0)
        entry.first_token_at = now
        entry.decoding_at_first = engine.decoding_seconds
        entry.prefill_at_first = engine.prefill_seconds
        entry.busy_at_first = self._busy_seconds
        if engine.reading or engine.group_size < 2 or not engine.is_group_whole:
            return None
        elapsed = now - engine.group_at
        return PrefillSeen(
            entry.claim.model,
            engine.group_tokens,
            elapsed,
            _mean(engine.decoding_seconds - engine.group_decoding, elapsed, 0.0),
            _mean(self._busy_seconds - engine.group_busy, elapsed, 1.0),
        )

    def ended(self, request_id: RequestId, now: float) -> DecodeSeen | None:
        """Forget a request, however it ended.

        Returns:
            the company it was decoded in; None when it was not in flight or streamed nothing.
        """
        entry = self._in_flight.get(request_id)
        if entry is None:
            return None
        self._advance(now)
        if self._was_worked_on(entry):
            self._heard(entry.claim.model, now)
        del self._in_flight[request_id]
        engine = self._engines[entry.claim.model]
        if entry.is_reading:
            engine.reading -= 1
            engine.is_group_whole = False  # it took time, and nobody knows how much was read
        else:
            engine.decoding -= 1
        if entry.first_token_at is None:
            return None
        seconds = now - entry.first_token_at
        return DecodeSeen(
            entry.claim.model,
            max(_mean(engine.decoding_seconds - entry.decoding_at_first, seconds, 1.0), 1.0),
            min(_mean(engine.prefill_seconds - entry.prefill_at_first, seconds, 0.0), 0.8),
            entry.was_alone,
            entry.decoding_in_prefill,
            max(_mean(self._busy_seconds - entry.busy_at_first, seconds, 1.0), 1.0),
            max(entry.prefill_busy_models, 1.0),
        )

    def is_in_flight(self, request_id: RequestId) -> bool:
        """Whether it was claimed and has not ended."""
        return request_id in self._in_flight

    def clear(self) -> int:
        """Forget everything: the node is gone; returns how many requests were lost with it."""
        lost = len(self._in_flight)
        self._in_flight.clear()
        self._engines.clear()
        self.paper = PaperBacklog()
        self._silent_seconds = 0.0
        return lost

    def backlog_seconds(self, now: float) -> float:
        """B: predicted executor seconds of work ahead of a new batch at `now`.

        The executor works on one thing or another all the time, so what passed since the last sign
        of progress is taken off the sum, but never below what the longest request may still need
        at the least, which guards against a silent node looking idle.
        """
        remaining = self._remaining_seconds()
        return sum(remaining) - self._worked_seconds(remaining, now)

    def _remaining_seconds(self) -> list[float]:
        return [entry.remaining_seconds() for entry in self._in_flight.values()]

    def _worked_seconds(self, remaining: Sequence[float], now: float) -> float:
        """Since the last sign of progress; a claim that came since takes nothing away from it."""
        worked = self._silent_seconds + max(now - self._heard_at, 0.0)
        return min(worked, sum(remaining) - 0.1 * max(remaining, default=0.0))

    def _was_worked_on(self, entry: _Entry) -> bool:
        """Whether it was not just waiting; prompts are read in the order of their claims."""
        reading = (
            other
            for other in self._in_flight.values()
            if other.is_reading and other.claim.model == entry.claim.model
        )
        return not entry.is_reading or next(reading) is entry

    def _heard(self, model: ModelName, now: float) -> None:
        """There was a sign of progress of one of the model's requests."""
        engine = self._engines[model]
        engine.heard_at = max(now, engine.heard_at)
        self._heard_at = max(now, self._heard_at)
        self._silent_seconds = 0.0

    def in_flight(self, now: float) -> tuple[InFlightWork, ...]:
        """What each request in flight still needs, in the order of their claims.

        Prompts are read in that order, so the seconds since an engine was last heard of are taken
        off the first ones.
        """
        spare = {model: max(now - engine.heard_at, 0.0) for model, engine in self._engines.items()}
        works = []
        for entry in self._in_flight.values():
            claim, prompt_left = entry.claim, 0.0
            if entry.is_reading:
                prompt_left = claim.prompt_tokens
                if claim.prefill_seconds > 0.0:
                    used = min(
                        spare[claim.model],
                        max(now - entry.dispatched_at, 0.0),
                        0.95 * claim.prefill_seconds,
                    )
                    spare[claim.model] -= used
                    prompt_left *= 1.0 - used / claim.prefill_seconds
            works.append(InFlightWork(claim.model, prompt_left, entry.remaining_tokens()))
        return tuple(works)

    def _advance(self, now: float) -> None:
        elapsed = max(now - self._at, 0.0)
        self._at = max(now, self._at)
        busy = 0
        for engine in self._engines.values():
            engine.decoding_seconds += engine.decoding * elapsed
            busy += engine.is_busy
        self._busy_seconds += busy * elapsed


def _mean(integral: float, seconds: float, default: float) -> float:
    return integral / seconds if seconds > 1e-6 else default
