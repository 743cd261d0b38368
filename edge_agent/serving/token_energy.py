"""Measures the joules of a token, read or written, by the node's own sensor."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from edge_agent.engine.base import (
    Finished,
    GenerationRequest,
    InferenceEngine,
    RejectedError,
    Sampling,
    TextChunk,
)
from edge_agent.errors import EngineError, EngineFailure

_IDLE_SECONDS: Final = 1.0
_PHASE_SECONDS: Final = 1.5
"""Long against a sensor's 0.1 s, so that the ends of a phase do not count for much."""
_LONGEST_SECONDS: Final = 30.0
_READING_TEXT: Final = (
    "The mill stands where the brook leaves the wood, and its wheel turns only after rain. "
)
_OPENING: Final = "Story {}. Once upon a time, on an island with two lighthouses, there was"


@dataclass(frozen=True, slots=True)
class TokenEnergy:
    """Above what the node draws when idle.

    Attributes:
        load_watts: of the whole node while all slots decoded.
    """

    prefill_joules_per_token: float
    decode_joules_per_token: float
    load_watts: float


@dataclass(slots=True)
class _Phase:
    joules: float
    seconds: float
    tokens: int

    def above(self, idle_watts: float) -> float:
        return max(0.0, self.joules - idle_watts * self.seconds) / max(self.tokens, 1)


async def measure_token_energy(
    engine: InferenceEngine,
    slots: int,
    read_joules: Callable[[], float],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> TokenEnergy | None:
    """Let the engine idle, read prompts and decode with all slots, each for over a second.

    Args:
        engine: loaded, with nothing else to do.
        read_joules: the node's energy so far, which only rises.
        clock: monotonic seconds.
        sleep: awaited while the engine idles.

    Returns:
        None when the engine did not read or write enough to be measured.

    Raises:
        EngineError: the engine failed.
    """
    joules, started = read_joules(), clock()
    await sleep(_IDLE_SECONDS)
    idle_watts = (read_joules() - joules) / max(clock() - started, 1e-6)
    try:
        reading = await asyncio.wait_for(
            _watch(engine, [_read_prompts], read_joules, clock), _LONGEST_SECONDS
        )
        writers = [_writer(number) for number in range(slots)]
        writing = await asyncio.wait_for(
            _watch(engine, writers, read_joules, clock), _LONGEST_SECONDS
        )
    except (asyncio.TimeoutError, RejectedError):
        return None
    if not reading.tokens or not writing.tokens:
        return None
    return TokenEnergy(
        prefill_joules_per_token=reading.above(idle_watts),
        decode_joules_per_token=writing.above(idle_watts),
        load_watts=writing.joules / max(writing.seconds, 1e-6),
    )


_Job = Callable[[InferenceEngine, Callable[[], bool]], Awaitable[int]]


async def _watch(
    engine: InferenceEngine,
    jobs: Sequence[_Job],
    read_joules: Callable[[], float],
    clock: Callable[[], float],
) -> _Phase:
    started, joules = clock(), read_joules()
    tasks = [
        asyncio.ensure_future(job(engine, lambda: clock() - started >= _PHASE_SECONDS))
        for job in jobs
    ]
    try:
        tokens = sum(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return _Phase(read_joules() - joules, clock() - started, tokens)


async def _read_prompts(engine: InferenceEngine, is_over: Callable[[], bool]) -> int:
    """Prompts of one token's answer, one after the other; each begins otherwise than the others.

    A prompt whose beginning is known already would not be read.
    """
    tokens = number = 0
    while not is_over():
        number += 1
        text = f"{number}. " + _READING_TEXT * 12
        request = GenerationRequest(f"joules-read-{number}", text, Sampling(1, temperature=0.0))
        finished = await _finish(engine, request)
        tokens += finished.prompt_tokens - finished.cached_prompt_tokens
    return tokens


def _writer(number: int) -> _Job:
    async def write(engine: InferenceEngine, is_over: Callable[[], bool]) -> int:
        tokens = turn = 0
        while not is_over():
            turn += 1
            key = f"joules-write-{number}-{turn}"
            opening = _OPENING.format(1000 * turn + number)
            request = GenerationRequest(key, opening, Sampling(160, temperature=0.0))
            async with aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, TextChunk):
                        tokens += event.tokens
                    if is_over():
                        await engine.cancel(key)
        return tokens

    return write


async def _finish(engine: InferenceEngine, request: GenerationRequest) -> Finished:
    async with aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Finished):
                return event
    raise EngineError(EngineFailure.CRASHED, "The engine ended an answer without a word.")
