"""The recipe for a new sensor, followed: a file, a row in the table, a board in the fixtures."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from controller.fleet.convert import HEALTH
from controller.fleet.node_metrics import register_node_metrics
from controller.ids import NodeId
from controller.profiler.events import HealthReported
from controller.profiler.state import ProfilerState
from controller.telemetry.metrics import Metrics
from edge_agent.link.convert import completion_to_proto, health_to_proto
from edge_agent.sensors import sources
from edge_agent.sensors.base import Coverage, NoData, PowerReading, Readings
from edge_agent.sensors.energy import Work
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.sampler import SensorSampler
from edge_agent.sensors.sources import KnownSensor, power_sensors, state_sensors
from edge_agent.sensors.sysfs import hwmon_named, read_number
from edge_agent.serving.completion import Completion, FinishReason, Usage
from tests.fakes.reports import hello, join
from tests.fakes.scraped import scraped
from tests.fixtures.sysfs.boards import Tree, surroundings, write


# 1. A file in edge_agent/sensors.
@dataclass(frozen=True, slots=True)
class PlugSensor:
    """A power plug that shows its microwatts in hwmon."""

    root: Path
    name: str = "plug"
    period_seconds: float = 0.5

    def read(self, now: float) -> Readings | NoData:
        """Read the plug once."""
        for folder in hwmon_named(self.root, "plug"):
            microwatts = read_number(folder / "power1_input")
            if microwatts is not None:
                return Readings(now, PowerReading(Coverage.BOARD, 0.02, microwatts / 1e6))
        return NoData("no plug")

    def close(self) -> None:
        """Nothing is held open."""


# 2. A row in edge_agent/sensors/sources.py.
ROW = KnownSensor(lambda place: PlugSensor(place.root), "any", "hwmon", "board, 2 %", "Nothing.")


# 3. A board in tests/fixtures/sysfs/boards.py.
def board_with_a_plug() -> Tree:
    return {
        "sys/class/hwmon/hwmon0/name": "plug\n",
        "sys/class/hwmon/hwmon0/power1_input": "7500000\n",
    }


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SensorSampler:
    """Of a board with a plug, read for a while with a request that ran for one second."""
    monkeypatch.setattr(sources, "POWER_SENSORS", (*sources.POWER_SENSORS, ROW))
    place = surroundings(write(tmp_path, board_with_a_plug()))
    now = 100.0
    made = SensorSampler(
        power_sensors(place), PowerModel(2.0, 4.0), state_sensors(place), clock=lambda: now
    )
    for _ in range(6):
        now += made.step()
    return made


def test_its_watts_reach_the_controller_under_its_own_name(sampler: SensorSampler) -> None:
    message = health_to_proto(sampler.readings, sampler.power(), [], sampler.sensors)
    health = HEALTH.read(message)
    assert (health.power_watts, health.power_source) == (pytest.approx(7.5), "plug")
    profiler, metrics = ProfilerState(10.0), Metrics()
    node = NodeId("pi")
    join(profiler, 1.0, hello(node))
    profiler.apply(HealthReported(node, health), 1.0)
    register_node_metrics(metrics, profiler)
    found = scraped(metrics)
    assert found["node_power_watts{node=pi}"] == pytest.approx(7.5)
    assert found["node_sensor_is_working{node=pi,sensor=plug}"] == 1
    assert "node_sensor_read_seconds{node=pi,sensor=plug}" in found


def test_joules_of_an_answer_bear_its_name(sampler: SensorSampler) -> None:
    charge = sampler.charge("small", Work(0.0, 1.0, 1.0))
    assert charge is not None
    used = Usage(energy_joules=charge.joules, energy_source=charge.source)
    completion = Completion("r1", 1, "small", FinishReason.STOP, used)
    usage = completion_to_proto(completion).usage
    assert (usage.energy_source_name, usage.is_energy_estimate) == ("plug", False)
    assert usage.energy_joules == pytest.approx(7.5)
