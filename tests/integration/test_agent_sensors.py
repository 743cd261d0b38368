"""A whole agent on a board with a power sensor, without a controller."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from edge_agent.app import run
from edge_agent.config import ControllerSettings, ModelSettings, Settings
from edge_agent.engine.base import EngineSettings, InferenceEngine
from edge_agent.engine.fake import FakeEngine
from edge_agent.engine.spec import PreparedModel
from edge_agent.errors import EngineError, EngineFailure
from edge_agent.render import print_status
from edge_agent.sensors.base import Sensor
from edge_agent.sensors.jetson import JetsonSensor
from edge_agent.serving.calibrations import Speeds
from edge_agent.status import ask_status
from tests.fakes.engines import engines_with
from tests.fixtures.sysfs.boards import orin_nano, write


async def prepare(name: str, report: Callable[[str], None]) -> PreparedModel:
    return PreparedModel(Path("/nowhere.gguf"), name, "fake", 0.1, "Q4_0", 2048, None)


async def calibrate(engine: InferenceEngine, slots: int) -> Speeds:
    return Speeds(2000.0, 200.0, 400.0)


async def status_of_agent(
    folder: Path,
    sensors: list[Sensor],
    is_enough: Callable[[dict[str, Any]], bool],
    make_engine: Callable[[EngineSettings], FakeEngine] = FakeEngine,
) -> dict[str, Any]:
    stop, ready = asyncio.Event(), asyncio.Event()
    settings = Settings(
        node_id="board",
        data_dir=folder / "data",
        drain_seconds=1.0,
        controller=ControllerSettings("127.0.0.1:1", insecure=True),
        models=(ModelSettings("fake-a", slots=2, threads=1),),
    )

    async def serve() -> None:
        await run(
            settings,
            stop,
            ready.set,
            prepare,
            engines_with(make_engine),
            calibrate,
            lambda settings: sensors,
        )

    with anyio.fail_after(60):
        agent = asyncio.create_task(serve())
        await ready.wait()
        status = await ask_status(settings.socket_path)
        while not is_enough(status):
            await asyncio.sleep(0.02)
            status = await ask_status(settings.socket_path)
        stop.set()
        await agent
    return status


def test_measured_power_and_its_energy_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sensor = JetsonSensor(write(tmp_path / "root", orin_nano()))
    status = asyncio.run(
        status_of_agent(
            tmp_path,
            [sensor],
            lambda status: bool(status["health"] and status["energy"]["total_joules"]),
        )
    )
    health, energy = status["health"], status["energy"]
    assert health["power_watts"] == pytest.approx(8.064)
    assert (health["power_source"], health["power_coverage"]) == ("ina3221", "board")
    assert health["power_sample_hertz"] == pytest.approx(10.0)
    assert health["power_detail"] == "VDD_IN"
    assert energy["requests_joules"] + energy["idle_joules"] == energy["total_joules"]
    assert energy["estimated_seconds"] == 0
    print_status(status)
    shown = capsys.readouterr().out
    assert "8.1 W (ina3221, board, ±5 %)" in shown
    assert "100 % of the time measured" in shown


def test_agent_whose_sensors_raise_starts_and_estimates(tmp_path: Path) -> None:
    class Broken:
        name = "broken"
        period_seconds = 0.1

        def read(self, now: float) -> Any:
            raise RuntimeError("Not Supported")

        def close(self) -> None:
            raise RuntimeError("nor this")

    status = asyncio.run(
        status_of_agent(tmp_path, [Broken()], lambda status: bool(status["energy"]["total_joules"]))
    )
    assert status["health"]["power_source"] == "estimate"
    assert status["health"]["power_relative_error"] > 0.3
    assert status["health"]["power_coverage"] in ("board", "partial")
    assert status["health"]["power_age_seconds"] >= 0
    assert status["energy"]["measured_seconds"] == 0


def test_board_whose_memory_is_in_pieces_says_that_it_needs_a_reboot(tmp_path: Path) -> None:
    def fragmented(settings: EngineSettings) -> FakeEngine:
        error = EngineError(EngineFailure.GPU_MEMORY_FRAGMENTED, "NvMap refused; drop the caches")
        return FakeEngine(settings, load_failure=error)

    status = asyncio.run(
        status_of_agent(tmp_path, [], lambda status: status["needs_reboot"], fragmented)
    )
    assert status["memory"]["largest_free_block_bytes"] != 0
    (model,) = status["models"]
    assert model["issue"] == "gpu_memory_fragmented: NvMap refused; drop the caches"
    assert any(issue.startswith("reboot_needed: ") for issue in status["issues"])
