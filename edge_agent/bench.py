"""Measures how fast a model reads and decodes on this machine, alone and with its slots busy.

Everything is measured through the engine's contract, from the events that a reader sees, so the
numbers are those that a client can get.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from edge_agent.engine.base import (
    EngineSettings,
    Finished,
    GenerationEvent,
    GenerationRequest,
    InferenceEngine,
    Message,
    PromptProgress,
    RejectedError,
    RejectionKind,
    Sampling,
    TextChunk,
)
from edge_agent.engine.llama.supervisor import SupervisedEngine
from edge_agent.errors import EngineError, EngineFailure, UsageError

Clock = Callable[[], float]

SEQUENCE_COUNTS: Final = (1, 2, 4, 8, 16, 32)
_READING_CHARACTERS: Final = 1600
_LONGEST_ANSWER_TOKENS: Final = 160
_LEAST_SECONDS: Final = 1e-6
_READING_TEXT: Final = (
    "The ferry leaves the north pier at seven and calls at three islands before noon. Two of"
    " them have a school, one has a doctor, and all of them have more sheep than people. "
)

# Openings that models of any size go on with for long, one for each sequence; the second kind is
# for a model that ends the first at once.
_SERIES: Final = tuple(
    ", ".join(str(number * 100 + step) for step in range(1, 4)) + "," for number in range(64)
)
STORY_OPENINGS: Final = tuple(
    f"Chapter {number}. Once upon a time, in a village by the sea, there was"
    for number in range(1, 65)
)


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """How fast some sequences were decoded at once.

    Attributes:
        sequences: decoded together.
        tokens_per_second: of all of them together; the median over the rounds.
        ratio: to one sequence alone; the median over the rounds of the ratio within each, so
            that a machine whose speed changes between rounds does not spoil it.
        rounds: tokens per second of each round.
    """

    sequences: int
    tokens_per_second: float
    ratio: float
    rounds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What `edge-agent bench` found out.

    Attributes:
        load_seconds: from the start of the child until the model was ready.
        prefill_tokens_per_second: of one prompt alone; the median over the rounds.
        decode: in order of `sequences`, beginning with one.
    """

    model: str
    description: str
    engine_version: str
    slots: int
    threads: int
    context_tokens: int
    load_seconds: float
    resident_bytes: int | None
    prefill_tokens_per_second: float
    decode: tuple[DecodeRate, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, under the names of the fields."""
        return asdict(self)


async def run_bench(
    settings: EngineSettings,
    *,
    rounds: int = 3,
    seconds: float = 1.5,
    make_engine: Callable[[EngineSettings], InferenceEngine] = SupervisedEngine,
    clock: Clock = time.monotonic,
) -> BenchReport:
    """Load a model, measure it, and unload it.

    Each round measures every number of sequences once, so that a disturbance of the machine
    meets them all.

    Args:
        settings: how the model is run; up to `slots` sequences are decoded at once.
        rounds: at least 1.
        seconds: of decoding for each measurement, above 0.
        make_engine: settings -> an engine that is not loaded yet.
        clock: monotonic seconds.

    Raises:
        UsageError: `rounds` or `seconds` is out of its range.
        EngineError: the model could not be loaded, or nothing could be measured.
    """
    if rounds < 1 or seconds <= 0:
        raise UsageError("A benchmark needs at least 1 round of more than 0 seconds.")
    async with AsyncExitStack() as stack:
        engine = make_engine(settings)
        stack.push_async_callback(engine.close)
        started_at = clock()
        model = await engine.load()
        load_seconds = clock() - started_at
        counts = sorted({n for n in SEQUENCE_COUNTS if n < model.slots} | {1, model.slots})
        await decode_tokens_per_second(
            engine, 1, seconds / 4, clock
        )  # the first tokens pay for cold caches
        prefill: list[float] = []
        decode: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(rounds):
            prefill.append(await _prefill_rate(engine, seconds, clock))
            for count in counts:
                decode[count].append(await decode_tokens_per_second(engine, count, seconds, clock))
    return BenchReport(
        model=settings.model_path.name,
        description=model.description,
        engine_version=model.engine_version,
        slots=model.slots,
        threads=settings.threads,
        context_tokens=model.context_tokens,
        load_seconds=load_seconds,
        resident_bytes=model.resident_bytes,
        prefill_tokens_per_second=statistics.median(prefill),
        decode=tuple(
            DecodeRate(
                sequences=count,
                tokens_per_second=statistics.median(rates),
                ratio=statistics.median(
                    rate / alone for rate, alone in zip(rates, decode[1], strict=True)
                ),
                rounds=tuple(rates),
            )
            for count, rates in decode.items()
        ),
    )


async def calibrate(
    engine: InferenceEngine, slots: int, quick: bool = True, clock: Clock = time.monotonic
) -> tuple[float, float, float]:
    """Measure a loaded engine that has nothing else to do.

    Takes some 4 seconds when quick, three times that otherwise; on a slow device fewer tokens
    are decoded, not more seconds spent.

    Args:
        engine: loaded.
        slots: sequences that it decodes at once.
        quick: one short round.
        clock: monotonic seconds.

    Returns:
        tokens per second: read of a prompt, decoded of one sequence alone, decoded of `slots`
        sequences together; each above 0, the last at least the second.

    Raises:
        EngineError: the engine failed, or nothing could be measured.
    """
    seconds, rounds = (1.0, 1) if quick else (2.0, 2)
    await decode_tokens_per_second(engine, 1, 0.3, clock)  # the first tokens pay for cold caches
    prefill, alone, together = [], [], []
    for _ in range(rounds):
        prefill.append(await _prefill_rate(engine, seconds, clock))
        alone.append(await decode_tokens_per_second(engine, 1, seconds, clock))
        together.append(
            await decode_tokens_per_second(engine, slots, seconds, clock)
            if slots > 1
            else alone[-1]
        )
    one_rate = statistics.median(alone)
    return (
        statistics.median(prefill),
        one_rate,
        max(one_rate, statistics.median(together)),
    )


async def _prefill_rate(engine: InferenceEngine, seconds: float, clock: Clock) -> float:
    """Tokens per second of one prompt; a prompt that takes longer is cancelled on the way."""
    characters = _READING_CHARACTERS
    while True:
        text = _READING_TEXT * (characters // len(_READING_TEXT) + 1)
        request = _asked(engine, "bench-read", text[:characters], 1)
        try:
            return await _timed_prefill(engine, request, seconds, clock)
        except RejectedError as error:
            if error.kind is not RejectionKind.CONTEXT_EXCEEDED or characters < 32:
                raise EngineError(
                    EngineFailure.CRASHED, f"The engine cannot be measured: {error}"
                ) from error
            characters //= 2  # a short context


async def _timed_prefill(
    engine: InferenceEngine, request: GenerationRequest, seconds: float, clock: Clock
) -> float:
    progress: list[tuple[float, int]] = []
    async with open_stream(engine, request) as events:
        async for event in events:
            now = clock()
            if isinstance(event, Finished):
                return event.prompt_tokens / max(event.prefill_seconds, _LEAST_SECONDS)
            if isinstance(event, PromptProgress) and not event.is_estimate:
                progress.append((now, event.tokens_read))
                # Two steps at least, so that there is something between them.
                if len(progress) > 2 and now - progress[0][0] > seconds:
                    break
    (first_at, first), (last_at, last) = progress[0], progress[-1]
    return (last - first) / max(last_at - first_at, _LEAST_SECONDS)


async def decode_tokens_per_second(
    engine: InferenceEngine, sequences: int, seconds: float, clock: Clock
) -> float:
    """Tokens per second of some sequences together, while all of them are being decoded.

    Args:
        engine: loaded, with nothing else to do.
        seconds: how long to decode; an answer of 160 tokens ends it earlier.

    Raises:
        EngineError: the engine failed, or nothing could be measured.
    """
    for openings in (_SERIES, STORY_OPENINGS):
        rate = await _timed_decode(engine, openings[:sequences], seconds, clock)
        if rate is not None:
            return rate
    raise EngineError(
        EngineFailure.CRASHED,
        "The model ended its answers at once, so its speed cannot be measured.",
    )


async def _timed_decode(
    engine: InferenceEngine, openings: Sequence[str], seconds: float, clock: Clock
) -> float | None:
    window = _Window(len(openings), seconds, clock)
    readers = [
        asyncio.create_task(_read_into(engine, f"bench-{number}", opening, window))
        for number, opening in enumerate(openings)
    ]
    try:
        await asyncio.gather(*readers)
    except RejectedError as error:
        raise EngineError(
            EngineFailure.CRASHED, f"The engine cannot be measured: {error}"
        ) from error
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return window.rate()


class _Window:
    """Counts tokens from when every sequence is decoding until the first one is done.

    It ends by itself after `seconds`. Tokens that are shown at the moment it opens were decoded
    before and do not count.
    """

    def __init__(self, sequences: int, seconds: float, clock: Clock) -> None:
        self._clock = clock
        self._sequences = sequences
        self._seconds = seconds
        self._started: set[str] = set()
        self._opened_at: float | None = None
        self._last_at = 0.0
        self._tokens = 0
        self.is_closed = False

    def add(self, key: str, tokens: int) -> None:
        if self.is_closed:
            return
        now = self._clock()
        if self._opened_at is not None:
            self._tokens += tokens
            self._last_at = now
            self.is_closed = now - self._opened_at >= self._seconds
        else:
            self._started.add(key)
            if len(self._started) == self._sequences:
                self._opened_at = now

    def rate(self) -> float | None:
        """Tokens per second; None when an answer ended before there was anything to count."""
        if self._opened_at is None or self._tokens == 0:
            return None
        return self._tokens / max(self._last_at - self._opened_at, _LEAST_SECONDS)


async def _read_into(engine: InferenceEngine, key: str, opening: str, window: _Window) -> None:
    request = _asked(engine, key, opening, _LONGEST_ANSWER_TOKENS)
    async with open_stream(engine, request) as events:
        async for event in events:
            if isinstance(event, TextChunk):
                window.add(key, event.tokens)
            if isinstance(event, Finished):
                window.is_closed = True
            if window.is_closed:
                break


def _asked(engine: InferenceEngine, key: str, text: str, max_tokens: int) -> GenerationRequest:
    """A request that the engine answers: a chat where it takes no raw prompts."""
    prompt = text if engine.stats().takes_raw_prompts else (Message("user", text),)
    return GenerationRequest(key, prompt, Sampling(max_tokens, temperature=0.0))


@asynccontextmanager
async def open_stream(
    engine: InferenceEngine, request: GenerationRequest
) -> AsyncIterator[AsyncIterator[GenerationEvent]]:
    """An answer's events; leaving early cancels it and waits until it has ended.

    Otherwise the next measurement would share its first steps with this one.
    """
    async with aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
        yield events
        await engine.cancel(request.key)
        async for _ in events:
            pass
