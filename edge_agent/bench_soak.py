"""Loads, answers and unloads for long, and tells what it did to the memory."""

import asyncio
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import psutil

from edge_agent.engine.base import (
    EngineSettings,
    Finished,
    FormatKind,
    GenerationRequest,
    Message,
    ResponseFormat,
    Sampling,
)
from edge_agent.engine.llama.supervisor import SupervisedEngine
from edge_agent.errors import UsageError

# What a process settles to: its first requests fill caches, pools and arenas.
_WARM_SHARE: Final = 0.1
_SAMPLES: Final = 40
_CANCELLED_EVERY: Final = 10
_FORMATTED_EVERY: Final = 25


@dataclass(frozen=True, slots=True)
class MemoryCourse:
    """How one process's resident memory went.

    Attributes:
        start_bytes: once it had settled, after the first tenth of the work.
        end_bytes: the median of the last samples.
        peak_bytes: the largest sample.
        growth_ratio: end / start - 1.
    """

    start_bytes: int
    end_bytes: int
    peak_bytes: int
    growth_ratio: float


@dataclass(frozen=True, slots=True)
class SoakReport:
    """What `edge-agent bench soak` found out.

    Attributes:
        parent_over_cycles: of this process, while the model was loaded and unloaded.
        parent_over_requests: of this process, while one loaded model answered.
        child_over_requests: of the model's child meanwhile.
        requests: answered; `cancelled` of them were ended early.
    """

    model: str
    cycles: int
    requests: int
    cancelled: int
    parent_over_cycles: MemoryCourse
    parent_over_requests: MemoryCourse
    child_over_requests: MemoryCourse

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, under the names of the fields."""
        return asdict(self)


async def run_soak(
    settings: EngineSettings,
    *,
    cycles: int = 200,
    requests: int = 10_000,
    report: Callable[[str], None] = lambda _text: None,
) -> SoakReport:
    """Load and unload a model `cycles` times, then have it answer `requests` times.

    The requests are short, of all kinds: raw and chats, sampled and greedy, in sessions, with a
    format, and some cancelled.

    Args:
        cycles: at least 2.
        requests: at least 20.
        report: told now and then how far it is.

    Raises:
        UsageError: too few to tell anything.
        EngineError: the engine failed.
    """
    if cycles < 2 or requests < 20:
        raise UsageError("A soak needs at least 2 cycles and 20 requests.")
    parent_cycles = []
    for number in range(cycles):
        engine = SupervisedEngine(settings, niceness=0)
        try:
            await engine.load()
            await _answer(engine, 0)
        finally:
            await engine.close()
        parent_cycles.append(_resident_bytes(None))
        if number % 20 == 0:
            report(f"cycle {number + 1} of {cycles}")
    engine = SupervisedEngine(settings, niceness=0)
    try:
        await engine.load()
        parent, child, cancelled = await _answer_many(engine, settings.slots, requests, report)
    finally:
        await engine.close()
    return SoakReport(
        model=settings.model_path.name,
        cycles=cycles,
        requests=requests,
        cancelled=cancelled,
        parent_over_cycles=course_of(parent_cycles),
        parent_over_requests=course_of(parent),
        child_over_requests=course_of(child),
    )


def course_of(samples: Sequence[int]) -> MemoryCourse:
    """What samples in order of time say; the first tenth is the time to settle.

    Args:
        samples: bytes, at least one.
    """
    warm = samples[min(len(samples) - 1, math.ceil(len(samples) * _WARM_SHARE)) :]
    window = max(1, len(warm) // 10)
    start, end = statistics.median_low(warm[:window]), statistics.median_low(warm[-window:])
    return MemoryCourse(start, end, max(samples), end / start - 1)


async def _answer_many(
    engine: SupervisedEngine, slots: int, requests: int, report: Callable[[str], None]
) -> tuple[list[int], list[int], int]:
    """(parent's samples, child's samples, cancelled requests)."""
    parent: list[int] = []
    child: list[int] = []
    numbers = iter(range(requests))
    cancelled = 0
    every = max(1, requests // _SAMPLES)

    async def keep_answering() -> None:
        nonlocal cancelled
        for number in numbers:
            was_cancelled = await _answer(engine, number)
            cancelled += was_cancelled  # not in one line: others count while this one waits
            if number % every == every - 1:
                parent.append(_resident_bytes(None))
                child.append(_resident_bytes(engine.child_pid))
                report(f"request {number + 1} of {requests}")

    # One more than there are slots, so that there is always one waiting.
    await asyncio.gather(*(keep_answering() for _ in range(slots + 1)))
    return parent, child, cancelled


async def _answer(engine: SupervisedEngine, number: int) -> bool:
    """One request of those that there are; whether it was cancelled."""
    prompt: str | tuple[Message, ...] = f"Number {number} is"
    if number % 9 == 0:
        prompt = (Message("system", f"You are number {number % 7}."), Message("user", "Hello!"))
    wanted = ResponseFormat(FormatKind.JSON_OBJECT) if number % _FORMATTED_EVERY == 1 else None
    request = GenerationRequest(
        f"soak-{number}",
        prompt,
        Sampling(1 + number % 3, temperature=float(number % 2), seed=number),
        wanted,
        session_id=f"session-{number % 11}" if number % 2 else "",
    )
    is_cancelled = number % _CANCELLED_EVERY == 7
    async for event in engine.generate(request):
        if is_cancelled:
            await engine.cancel(request.key)
        if isinstance(event, Finished):
            break
    return is_cancelled


def _resident_bytes(pid: int | None) -> int:
    if pid is None:
        gc.collect()
    return int(psutil.Process(pid).memory_info().rss)
