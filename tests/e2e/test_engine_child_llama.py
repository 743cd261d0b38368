"""An engine's process beside the agent's: its priority, its silence, its want of memory."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from edge_agent import app as agent_app
from edge_agent.config import ControllerSettings, ModelSettings, Settings
from edge_agent.engine.base import EngineSettings, GenerationRequest, Sampling
from edge_agent.engine.llama import supervisor
from edge_agent.engine.llama.supervisor import SupervisedEngine
from edge_agent.engine.spec import PreparedModel, Report
from edge_agent.errors import EngineError, EngineFailure
from edge_agent.status import StatusObject, ask_status
from tests.fakes.fleet import RunningFleet, calibrate_fake, infer_request, running_fleet
from tests.fakes.waiting import until

pytestmark = [pytest.mark.llama, pytest.mark.anyio]

SECONDS = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def loaded(path: Path, **options: float) -> AsyncIterator[tuple[SupervisedEngine, int]]:
    """An engine and its process id."""
    settings = EngineSettings(path, context_tokens=512, slots=1, threads=1)
    engine = SupervisedEngine(settings, **options)  # type: ignore[arg-type]
    try:
        await asyncio.wait_for(engine.load(), SECONDS)
        assert engine.child_pid is not None
        yield engine, engine.child_pid
    finally:
        await asyncio.wait_for(engine.close(), SECONDS)


async def test_engine_gives_way_to_the_agent(smollm2: Path) -> None:
    """P3."""
    async with loaded(smollm2, niceness=7) as (_, pid):
        assert psutil.Process(pid).nice() == psutil.Process().nice() + 7


async def test_engine_that_the_kernel_killed_for_its_memory_cools_down(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P13: it is not started again at once, to take memory from everything else again."""
    kills = 3
    monkeypatch.setattr(supervisor, "oom_kills", lambda: kills)
    pauses = {"first_restart_seconds": 0.01, "memory_restart_seconds": SECONDS}
    async with loaded(smollm2, **pauses) as (engine, pid):
        kills += 1
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.stats().failure is not None, SECONDS)
        assert engine.stats().failure is EngineFailure.OUT_OF_MEMORY
        assert (engine.stats().issue or "").startswith("engine_out_of_memory: ")
        await asyncio.sleep(0.5)  # many first pauses
        assert engine.child_pid is None
        with pytest.raises(EngineError, match="ran out of memory"):
            await anext(aiter(engine.generate(GenerationRequest("k", "One,", Sampling(1)))))


@asynccontextmanager
async def serving(fleet: RunningFleet, weights: Path, folder: Path) -> AsyncIterator[Settings]:
    """A whole agent with one real engine that answers."""
    stop = asyncio.Event()
    settings = Settings(
        node_id="pi",
        data_dir=folder,
        drain_seconds=0.1,
        controller=ControllerSettings(fleet.listening.grpc_address, insecure=True),
        models=(ModelSettings("real", slots=1, threads=1, context_tokens=512),),
    )

    async def prepare(name: str, report: Report) -> PreparedModel:
        return PreparedModel(weights, name, "llama", 0.1, "Q4_1", 2048, None)

    task = asyncio.create_task(
        agent_app.run(
            settings,
            stop,
            fetch=prepare,
            calibrate=calibrate_fake,
            find_sensors=lambda settings: [],
        )
    )
    try:
        await fleet.wait_for_state("pi", "ready")
        yield settings
    finally:
        stop.set()
        await asyncio.wait_for(task, SECONDS)


async def test_stopped_engine_keeps_no_report_from_being_made(
    smollm2: Path, tmp_path: Path
) -> None:
    """P10: 1. an answer is under way, 2. the engine stands still, 3. status and health go on."""
    async with (
        running_fleet(tmp_path) as fleet,
        serving(fleet, smollm2, tmp_path / "agent") as settings,
    ):

        async def ask() -> None:
            request = infer_request("Count: one, two,", "real", max_tokens=400)
            with contextlib.suppress(Exception):  # it is never answered
                async for _ in fleet.client.router.Infer(request, timeout=SECONDS):
                    pass

        async def status() -> StatusObject:
            return await ask_status(settings.socket_path)

        asking = asyncio.create_task(ask())
        deadline = time.monotonic() + SECONDS
        while (await status())["models"][0]["busy_slots"] == 0:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        (child,) = (
            process
            for process in psutil.Process().children()
            if "edge_agent.engine.llama.llama_cpp" in process.cmdline()
        )
        child.suspend()
        try:
            first = (await fleet.nodes())["pi"].health.uptime_seconds
            while (await fleet.nodes())["pi"].health.uptime_seconds < first + 1.0:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert child.status() == psutil.STATUS_STOPPED
            now = await status()
            assert (now["state"], now["models"][0]["busy_slots"]) == ("ready", 1)
        finally:
            child.resume()
            asking.cancel()
            await asyncio.wait([asking])
