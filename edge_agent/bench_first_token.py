"""Measures how long a short prompt waits for its first token while a long one is being read.

Three times are measured in each round and compared within it: the first token of a short prompt
on an idle engine, how long a chunk of the long prompt takes, and the first token of a short
prompt that comes while the long one is being read.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from edge_agent.bench import STORY_OPENINGS, open_stream
from edge_agent.engine.base import (
    EngineSettings,
    GenerationRequest,
    InferenceEngine,
    PromptProgress,
    Sampling,
    TextChunk,
)
from edge_agent.engine.llama.supervisor import SupervisedEngine
from edge_agent.errors import EngineError, EngineFailure, UsageError

LONG_TOKENS: Final = 2000
ALLOWED_IDLE_TIMES: Final = 2.0
# For an opening, a number and the error of the estimate.
ROOM_TOKENS: Final = 128
_CHUNKS_BEFORE: Final = 3
_LONG_TEXT: Final = "the quick brown fox jumps over the lazy dog and "
_LEAST_SECONDS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class FirstTokenRound:
    """One round; seconds.

    Attributes:
        idle_seconds: to the first text of a short prompt on an idle engine.
        chunk_seconds: between two reports of the long prompt's progress, before the short one
            came; the median.
        beside_seconds: to the first text of a short prompt that came while the long one was read.
    """

    idle_seconds: float
    chunk_seconds: float
    beside_seconds: float

    @property
    def allowed_seconds(self) -> float:
        """Twice the time on an idle engine and one chunk."""
        return ALLOWED_IDLE_TIMES * self.idle_seconds + self.chunk_seconds

    @property
    def ratio(self) -> float:
        """The time beside the long prompt, to what is allowed."""
        return self.beside_seconds / max(self.allowed_seconds, _LEAST_SECONDS)


@dataclass(frozen=True, slots=True)
class FirstTokenReport:
    """What `edge-agent bench first-token` found out.

    Attributes:
        long_tokens: of the long prompt.
        idle_seconds, chunk_seconds, beside_seconds, allowed_seconds: medians over the rounds; see
            `FirstTokenRound`.
        ratio: the median over the rounds of the ratio within each.
        worst_ratio: the largest of them.
        rounds: in their order. The short prompt comes at another part of a chunk in each, spread
            evenly, as requests do that know nothing of chunks.
    """

    model: str
    slots: int
    threads: int
    context_tokens: int
    long_tokens: int
    idle_seconds: float
    chunk_seconds: float
    beside_seconds: float
    allowed_seconds: float
    ratio: float
    worst_ratio: float
    rounds: tuple[FirstTokenRound, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, under the names of the fields."""
        return asdict(self)


async def run_first_token(
    settings: EngineSettings,
    *,
    rounds: int = 9,
    long_tokens: int = LONG_TOKENS,
    make_engine: Callable[[EngineSettings], InferenceEngine] = SupervisedEngine,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> FirstTokenReport:
    """Load a model, measure first tokens beside a long prompt, and unload it.

    Args:
        settings: how the model is run; at least 2 slots.
        rounds: at least 1.
        long_tokens: of the long prompt, about; it must fit into the context.
        make_engine: settings -> an engine that is not loaded yet.
        clock: monotonic seconds.
        sleep: awaited until the short prompt comes.

    Raises:
        UsageError: there are too few slots or rounds, or the long prompt does not fit.
        EngineError: the engine failed, or read the long prompt before it could be measured.
    """
    if rounds < 1:
        raise UsageError("A benchmark needs at least 1 round.")
    if settings.slots < 2:
        raise UsageError("Two prompts at once need at least 2 slots.")
    if settings.context_tokens < long_tokens + ROOM_TOKENS:
        raise UsageError(
            f"A prompt of {long_tokens} tokens needs a context of"
            f" {long_tokens + ROOM_TOKENS} tokens; give --context-tokens."
        )
    engine = make_engine(settings)
    try:
        model = await engine.load()
        await _first_token(engine, "warm-up", STORY_OPENINGS[0], clock)
        text, tokens = await _long_prompt(engine, long_tokens)
        measured = []
        for number in range(rounds):
            phase_ratio = (number + 0.5) / rounds
            measured.append(await _round(engine, number, phase_ratio, text, clock, sleep))
    finally:
        await engine.close()
    return FirstTokenReport(
        model=settings.model_path.name,
        slots=model.slots,
        threads=settings.threads,
        context_tokens=model.context_tokens,
        long_tokens=tokens,
        idle_seconds=statistics.median(each.idle_seconds for each in measured),
        chunk_seconds=statistics.median(each.chunk_seconds for each in measured),
        beside_seconds=statistics.median(each.beside_seconds for each in measured),
        allowed_seconds=statistics.median(each.allowed_seconds for each in measured),
        ratio=statistics.median(each.ratio for each in measured),
        worst_ratio=max(each.ratio for each in measured),
        rounds=tuple(measured),
    )


async def _long_prompt(engine: InferenceEngine, tokens: int) -> tuple[str, int]:
    """A text of about so many tokens, and how many it has."""
    sample = 50
    has = await _count_tokens(engine, _LONG_TEXT * sample)
    text = _LONG_TEXT * max(1, sample * tokens // has)
    return text, await _count_tokens(engine, text)


async def _count_tokens(engine: InferenceEngine, prompt: str) -> int:
    request = GenerationRequest("count", prompt, Sampling(1, temperature=0.0))
    async with open_stream(engine, request) as events:
        async for event in events:
            if isinstance(event, PromptProgress):
                return event.tokens_total
    raise EngineError(EngineFailure.CRASHED, "The engine does not tell how far a prompt is read.")


async def _first_token(
    engine: InferenceEngine, key: str, prompt: str, clock: Callable[[], float]
) -> float:
    """Seconds until a prompt's first text."""
    request = GenerationRequest(key, prompt, Sampling(8, temperature=0.0))
    started_at = clock()
    async with open_stream(engine, request) as events:
        async for event in events:
            if isinstance(event, TextChunk):
                return clock() - started_at
    raise EngineError(
        EngineFailure.CRASHED, "The model ended its answer at once, so it cannot be measured."
    )


async def _round(
    engine: InferenceEngine,
    number: int,
    phase_ratio: float,
    long_text: str,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]],
) -> FirstTokenRound:
    """Measure once; the short prompt comes after this part of a chunk."""
    openings = STORY_OPENINGS[(2 * number) % len(STORY_OPENINGS) :]
    idle = await _first_token(engine, f"idle-{number}", openings[0], clock)
    # Another beginning each time, so that nothing of the round before can be used again.
    request = GenerationRequest(f"long-{number}", f"{number} {long_text}", Sampling(1))
    read_at: list[float] = []
    has_seen_enough = asyncio.Event()

    async def read_long() -> None:
        async with open_stream(engine, request) as events:
            async for event in events:
                if isinstance(event, TextChunk):
                    break
                if isinstance(event, PromptProgress):
                    read_at.append(clock())
                if len(read_at) == _CHUNKS_BEFORE:
                    has_seen_enough.set()
        has_seen_enough.set()

    reader = asyncio.create_task(read_long(), name=request.key)
    try:
        await has_seen_enough.wait()
        chunk = statistics.median(
            [later - sooner for sooner, later in itertools.pairwise(read_at)] or [0.0]
        )
        await sleep(phase_ratio * chunk)
        beside = await _first_token(engine, f"beside-{number}", openings[1], clock)
        if reader.done():
            raise EngineError(
                EngineFailure.CRASHED,
                "The long prompt was read before anything could be measured beside it;"
                " take a longer one.",
            )
        await engine.cancel(request.key)
        await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    return FirstTokenRound(idle, chunk, beside)
