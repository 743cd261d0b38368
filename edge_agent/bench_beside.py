"""Measures the engine beside llama.cpp's own tools: the same file, context, batch and threads.

The tools come from the same sources as the installed llama-cpp-python; `docs/engine.md` says how
to build them. Whoever measures on a machine that is not idle can trust the ratios alone.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from edge_agent.bench import STORY_OPENINGS, decode_tokens_per_second
from edge_agent.engine.base import (
    EngineSettings,
    Finished,
    GenerationRequest,
    InferenceEngine,
    Sampling,
)
from edge_agent.engine.llama.child import OPENMP_ENVIRONMENT
from edge_agent.engine.llama.supervisor import SupervisedEngine
from edge_agent.errors import EngineError, EngineFailure, UsageError

_BATCH_TOKENS: Final = 512
_PROMPT_TOKENS: Final = 16
_ANSWER_TOKENS: Final = 128
_TOOL_SECONDS: Final = 600.0
# Its log has a thread of its own, which has been seen to lose what it had at the end.
_TOOL_TRIES: Final = 3
_SERVER_START_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class BesideReport:
    """The engine beside llama.cpp's tools.

    Attributes:
        tokens_per_second: of the engine, all slots together; the median over the rounds.
        tool_tokens_per_second: of llama-batched-bench.
        decode_ratio: the median over the rounds of the ratio within each.
        rounds: the ratio of each round.
        peak_bytes: most memory that the engine's child had resident, after an answer in every
            slot and a long prompt; None when it was not compared.
        server_peak_bytes: of llama-server after the same work.
        memory_ratio: peak_bytes / server_peak_bytes.
    """

    model: str
    slots: int
    threads: int
    context_tokens: int
    tokens_per_second: float
    tool_tokens_per_second: float
    decode_ratio: float
    rounds: tuple[float, ...]
    peak_bytes: int | None
    server_peak_bytes: int | None
    memory_ratio: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, under the names of the fields."""
        return asdict(self)


def _engine(settings: EngineSettings) -> InferenceEngine:
    """An engine that steps aside for others no more than the tools do."""
    return SupervisedEngine(settings, niceness=0)


async def run_beside(
    settings: EngineSettings,
    tool: Path,
    *,
    server: Path | None = None,
    rounds: int = 3,
    make_engine: Callable[[EngineSettings], InferenceEngine] = _engine,
    clock: Callable[[], float] = time.monotonic,
) -> BesideReport:
    """Measure the engine and llama-batched-bench in turns, and the memory beside llama-server.

    Args:
        settings: how the model is run; every slot is used.
        tool: llama-batched-bench.
        server: llama-server; None compares no memory.
        rounds: at least 1; who goes first alternates.
        make_engine: settings -> an engine that is not loaded yet.

    Raises:
        UsageError: a tool is not there, or the context is too short for the comparison.
        EngineError: the engine or a tool failed.
    """
    for path in filter(None, (tool, server)):
        if not os.access(path, os.X_OK):
            raise UsageError(f"{path} is no program that can be run; see docs/engine.md.")
    if rounds < 1:
        raise UsageError("A benchmark needs at least 1 round.")
    if settings.context_tokens < 2 * (_PROMPT_TOKENS + _ANSWER_TOKENS):
        raise UsageError(f"The comparison needs a context of {4 * _ANSWER_TOKENS} tokens.")
    ours: list[float] = []
    theirs: list[float] = []
    engine = make_engine(settings)
    try:
        await engine.load()

        async def measure_ours() -> None:
            ours.append(await decode_tokens_per_second(engine, settings.slots, 3600.0, clock))

        async def measure_theirs() -> None:
            theirs.append(await _tool_rate(tool, settings))

        await decode_tokens_per_second(engine, settings.slots, 1.0, clock)  # warms the caches
        for number in range(rounds):
            order = [measure_ours, measure_theirs]
            for measure in order if number % 2 == 0 else reversed(order):
                await measure()
        peak = None
        if server is not None:
            await _work(_engine_answer(engine), settings)
            peak = _peak_bytes(getattr(engine, "child_pid", None))
    finally:
        await engine.close()
    server_peak = None if server is None else await _server_peak(server, settings)
    ratios = tuple(one / other for one, other in zip(ours, theirs, strict=True))
    return BesideReport(
        model=settings.model_path.name,
        slots=settings.slots,
        threads=settings.threads,
        context_tokens=settings.context_tokens,
        tokens_per_second=statistics.median(ours),
        tool_tokens_per_second=statistics.median(theirs),
        decode_ratio=statistics.median(ratios),
        rounds=ratios,
        peak_bytes=peak,
        server_peak_bytes=server_peak,
        memory_ratio=None if peak is None or not server_peak else peak / server_peak,
    )


def _common_options(settings: EngineSettings) -> list[str]:
    total = settings.slots * -(-settings.context_tokens // 256) * 256
    return [
        *("-m", str(settings.model_path), "-c", str(total)),
        *("-b", str(_BATCH_TOKENS), "-ub", str(_BATCH_TOKENS)),
        *("-t", str(settings.threads), "-tb", str(settings.threads)),
    ]


async def _tool_rate(tool: Path, settings: EngineSettings) -> float:
    """Tokens a second of llama-batched-bench, all sequences together."""
    command = [
        str(tool),
        *_common_options(settings),
        *("-npp", str(_PROMPT_TOKENS), "-ntg", str(_ANSWER_TOKENS)),
        *("-npl", str(settings.slots), "--output-format", "jsonl"),
    ]
    output = ""
    for _ in range(_TOOL_TRIES):
        output = await _run(command)
        for line in output.splitlines():
            if line.startswith("{"):
                return float(json.loads(line)["speed_tg"])
    raise EngineError(EngineFailure.CRASHED, f"{tool.name} printed no result: {output[-300:]}")


async def _run(command: Sequence[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**OPENMP_ENVIRONMENT, **os.environ},
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _TOOL_SECONDS)
    except asyncio.TimeoutError:
        raise EngineError(
            EngineFailure.STALLED, f"{command[0]} did not end within {_TOOL_SECONDS:.0f} s."
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode(errors="replace")
    if process.returncode:
        raise EngineError(
            EngineFailure.CRASHED, f"{command[0]} ended with {process.returncode}: {text[-300:]}"
        )
    return text


Answer = Callable[[str, str, int], Any]


async def _work(answer: Answer, settings: EngineSettings) -> None:
    """An answer in every slot at once, then a prompt that fills half a context."""
    openings = STORY_OPENINGS[: settings.slots]
    await asyncio.gather(*(answer(f"work-{n}", opening, 32) for n, opening in enumerate(openings)))
    await answer("long", "the quick brown fox " * (settings.context_tokens // 8), 1)


def _engine_answer(engine: InferenceEngine) -> Answer:
    async def answer(key: str, prompt: str, tokens: int) -> None:
        request = GenerationRequest(key, prompt, Sampling(tokens, temperature=0.0))
        async for event in engine.generate(request):
            if isinstance(event, Finished):
                return

    return answer


async def _server_peak(server: Path, settings: EngineSettings) -> int:
    """The most memory that llama-server has had resident after the same work."""
    async with _running_server(server, settings) as (pid, client):

        async def answer(_key: str, prompt: str, tokens: int) -> None:
            body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0}
            reply = await client.post("/completion", json=body)
            reply.raise_for_status()

        try:
            await _work(answer, settings)
        except httpx.HTTPError as error:
            raise EngineError(
                EngineFailure.CRASHED, f"{server.name} did not answer: {error}."
            ) from error
        peak = _peak_bytes(pid)
    if peak is None:
        raise EngineError(EngineFailure.CRASHED, f"{server.name} has ended early.")
    return peak


@contextlib.asynccontextmanager
async def _running_server(
    server: Path, settings: EngineSettings
) -> AsyncIterator[tuple[int, httpx.AsyncClient]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        str(server),
        *_common_options(settings),
        *("-np", str(settings.slots), "--host", "127.0.0.1", "--port", str(port)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**OPENMP_ENVIRONMENT, **os.environ},
    )
    try:
        base_url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base_url, timeout=_TOOL_SECONDS) as client:
            deadline = time.monotonic() + _SERVER_START_SECONDS
            while not await _is_ready(client):
                if process.returncode is not None or time.monotonic() > deadline:
                    raise EngineError(EngineFailure.CRASHED, f"{server.name} did not start.")
                await asyncio.sleep(0.1)
            yield process.pid, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _peak_bytes(pid: int | None) -> int | None:
    """The most memory that a process has had resident, mapped files included; Linux only."""
    if pid is None:
        return None
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
