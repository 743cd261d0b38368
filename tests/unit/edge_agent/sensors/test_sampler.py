"""The sampler, a step at a time on a clock of its own."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_agent.sensors.base import ESTIMATE, Coverage, NoData, PowerReading, Readings
from edge_agent.sensors.board import BoardSensor
from edge_agent.sensors.energy import Work
from edge_agent.sensors.jetson import JetsonSensor
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.sampler import SensorSampler, probe
from tests.fixtures.sysfs.boards import orin_nano, pi_4, write

MODEL = PowerModel(2.0, 10.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeSensor:
    """Says what it is told."""

    period_seconds = 0.1

    def __init__(
        self,
        name: str = "ina3221",
        watts: float | None = 10.0,
        coverage: Coverage = Coverage.BOARD,
    ) -> None:
        self.name = name
        self.watts = watts
        self.coverage = coverage
        self.error: Exception | None = None
        self.reads = 0
        self.is_closed = False

    def read(self, now: float) -> Readings | NoData:
        self.reads += 1
        if self.error is not None:
            raise self.error
        if self.watts is None:
            return NoData("gone", "plug it in")
        return Readings(now, PowerReading(self.coverage, 0.05, self.watts, detail="a rail"))

    def close(self) -> None:
        self.is_closed = True


def steps(sampler: SensorSampler, clock: Clock, seconds: float) -> None:
    end = clock.now + seconds
    while clock.now < end:
        clock.now += sampler.step()


def test_board_sensor_wins_over_parts_of_the_machine() -> None:
    package = FakeSensor("rapl", coverage=Coverage.PACKAGE)
    board = FakeSensor("ina3221")
    assert probe([package, board], 0.0)[0] == [board]


def test_package_and_cards_are_added(tmp_path: Path) -> None:
    clock = Clock()
    package = FakeSensor("rapl", 30.0, Coverage.PACKAGE)
    cards = FakeSensor("nvml", 300.0, Coverage.GPU)
    sampler = SensorSampler([package, cards], MODEL, clock=clock)
    steps(sampler, clock, 3.0)
    power = sampler.power()
    assert power.power_watts == pytest.approx(330.0)
    assert (power.source, power.coverage) == ("nvml", Coverage.PARTIAL)


def test_source_in_name_only_is_not_chosen_and_the_start_succeeds() -> None:
    dead = FakeSensor("nvml", coverage=Coverage.GPU)
    dead.error = RuntimeError("Not Supported")
    alive = FakeSensor("rapl", coverage=Coverage.PACKAGE)
    chosen, refused = probe([dead, alive], 0.0)
    assert chosen == [alive]
    assert "Not Supported" in refused["nvml"].reason


def test_sensor_that_raises_stops_nothing_and_the_model_takes_over() -> None:
    clock, sensor = Clock(), FakeSensor()
    sampler = SensorSampler([sensor], MODEL, clock=clock)
    steps(sampler, clock, 1.0)
    assert sampler.power().source == "ina3221"
    sensor.error = ValueError("a kernel bug")
    steps(sampler, clock, 2.0)
    assert sampler.power().source == ESTIMATE
    assert sampler.totals().estimated_seconds > 0


def test_lost_sensor_is_probed_with_back_off_and_taken_again() -> None:
    clock, sensor = Clock(), FakeSensor(watts=None)
    sampler = SensorSampler([sensor], MODEL, clock=clock)
    steps(sampler, clock, 1000.0)
    assert sensor.reads < 30
    assert sampler.unreadable == ["ina3221: gone; fix: plug it in"]
    sensor.watts = 7.0
    steps(sampler, clock, 61.0)
    assert sampler.power().power_watts == pytest.approx(7.0)
    assert sampler.unreadable == []


def test_second_source_that_is_mended_is_taken_within_a_minute() -> None:
    """A driver of the cards that comes back, beside a package that was measured all along."""
    clock = Clock()
    package = FakeSensor("rapl", 30.0, Coverage.PACKAGE)
    cards = FakeSensor("nvml", None, Coverage.GPU)
    sampler = SensorSampler([package, cards], MODEL, clock=clock)
    steps(sampler, clock, 3.0)
    assert sampler.power().source == "rapl"
    cards.watts = 300.0
    steps(sampler, clock, 65.0)
    assert sampler.power().power_watts == pytest.approx(330.0)
    assert cards.reads < 100


def test_answer_is_charged_from_what_was_measured() -> None:
    clock, sensor = Clock(), FakeSensor(watts=10.0)
    sampler = SensorSampler([sensor], MODEL, clock=clock)
    steps(sampler, clock, 1.0)
    sampler.engines_busy({"small": 1})
    steps(sampler, clock, 2.0)
    clock.now += 0.04  # between two readings
    charge = sampler.charge("small", Work(0.0, 2.0, 1.5))
    assert charge is not None
    assert charge.source == "ina3221"
    assert charge.joules == pytest.approx(15.0)
    totals = sampler.totals()
    assert totals.requests_joules + totals.idle_joules == pytest.approx(totals.total_joules)


def test_answer_without_a_sensor_costs_its_work_at_full_power() -> None:
    """An estimate, and labelled as one."""
    clock = Clock()
    sampler = SensorSampler([], MODEL, clock=clock)
    sampler.step()
    clock.now += 3.0
    sampler.engines_busy({"small": 1})
    clock.now += 2.0
    charge = sampler.charge("small", Work(0.0, 2.0, 2.0))
    sampler.engines_busy({})
    assert charge is not None
    assert charge.source == ESTIMATE
    assert charge.joules == pytest.approx(20.0)
    assert sampler.totals().idle_joules == pytest.approx(6.0)


def test_node_without_sensor_and_model_has_no_power_rather_than_zero() -> None:
    clock = Clock()
    sampler = SensorSampler([], None, clock=clock)
    steps(sampler, clock, 3.0)
    power = sampler.power()
    assert (power.power_watts, power.source) == (None, None)
    assert sampler.charge("small", Work(0.0, 1.0, 1.0)) is None


def test_wall_clock_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump of the wall clock cannot matter to who never looks at it."""

    def refuse() -> float:
        raise AssertionError("the wall clock was asked")

    monkeypatch.setattr(time, "time", refuse)
    clock = Clock()
    sampler = SensorSampler([FakeSensor()], MODEL, clock=clock)
    steps(sampler, clock, 1.0)
    assert sampler.totals().total_joules > 0


def test_readings_are_timed_by_the_monotonic_clock() -> None:
    seen: list[float] = []

    class Timed(FakeSensor):
        def read(self, now: float) -> Readings | NoData:
            seen.append(now)
            return super().read(now)

    before = time.monotonic()
    SensorSampler([Timed()], MODEL).step()
    assert seen
    assert all(before <= now <= time.monotonic() for now in seen)


def test_throttling_of_the_board_is_passed_on(tmp_path: Path) -> None:
    write(tmp_path, pi_4())
    (tmp_path / "sys/devices/platform/soc/soc:firmware/get_throttled").write_text("4\n")
    sampler = SensorSampler([], MODEL, [BoardSensor(tmp_path)], clock=Clock())
    sampler.step()
    assert sampler.readings.is_throttled is True


def test_jetson_is_read_ten_times_a_second(tmp_path: Path) -> None:
    clock = Clock()
    sampler = SensorSampler([JetsonSensor(write(tmp_path, orin_nano()))], MODEL, clock=clock)
    steps(sampler, clock, 5.0)
    power = sampler.power()
    assert power.sample_hertz == pytest.approx(10.0)
    assert power.power_watts == pytest.approx(8.064)


def test_thread_starts_reads_and_ends() -> None:
    class Signalling(FakeSensor):
        def __init__(self) -> None:
            super().__init__()
            self.was_read = threading.Event()

        def read(self, now: float) -> Readings | NoData:
            self.was_read.set()
            return super().read(now)

    sensor = Signalling()
    sampler = SensorSampler([sensor], MODEL)
    sampler.start()
    assert sensor.was_read.wait(10.0)
    sampler.close()
    assert sensor.is_closed
    assert "sensors" not in {thread.name for thread in threading.enumerate()}


class FakeState:
    """A sensor of anything but power."""

    def __init__(self, name: str = "host", period_seconds: float = 1.0, **says: Any) -> None:
        self.name = name
        self.period_seconds = period_seconds
        self.says = says
        self.error: Exception | None = None
        self.read_at: list[float] = []

    def read(self, now: float) -> Readings | NoData:
        self.read_at.append(now)
        if self.error is not None:
            raise self.error
        return Readings(now, **self.says)

    def close(self) -> None:
        """Nothing is held open."""


def test_state_is_read_at_its_own_period_however_often_power_is() -> None:
    clock, state = Clock(), FakeState(period_seconds=2.0)
    sampler = SensorSampler([FakeSensor()], MODEL, [state], clock=clock)
    for _ in range(10):
        steps(sampler, clock, 0.99)
        assert sampler.readings is not None
    assert state.read_at == pytest.approx([100.0, 102.0, 104.0, 106.0, 108.0], abs=0.11)


def test_state_that_nobody_asks_for_is_read_every_five_seconds() -> None:
    """An idle agent without a controller costs next to nothing."""
    clock, state = Clock(), FakeState()
    sampler = SensorSampler([], MODEL, [state], clock=clock)
    steps(sampler, clock, 30.0)
    assert len(state.read_at) <= 11
    before = len(state.read_at)
    for _ in range(5):
        assert sampler.readings is not None
        steps(sampler, clock, 1.0)
    assert len(state.read_at) >= before + 4


def test_first_sensor_that_knows_a_quantity_says_it_for_the_node() -> None:
    board = FakeState("board", temperature_celsius=50.0)
    host = FakeState("host", temperature_celsius=40.0, cpu_utilisation_ratio=0.25)
    sampler = SensorSampler([], MODEL, [board, host], clock=Clock())
    sampler.step()
    readings = sampler.readings
    assert (readings.temperature_celsius, readings.cpu_utilisation_ratio) == (50.0, 0.25)
    assert readings.gpu_utilisation_ratio is None


def test_estimate_goes_by_the_utilisation_that_the_host_says() -> None:
    clock, host = Clock(), FakeState(cpu_utilisation_ratio=0.25)
    sampler = SensorSampler([], MODEL, [host], clock=clock)
    assert sampler.power().power_watts == pytest.approx(2.0)  # nothing is known yet
    sampler.step()
    clock.now += 0.4
    power = sampler.power()
    assert (power.power_watts, power.source) == (pytest.approx(4.0), ESTIMATE)
    assert power.age_seconds == pytest.approx(0.4)


def test_load_of_the_cards_is_known_while_they_are_the_source_of_power() -> None:
    class Cards(FakeSensor):
        def read(self, now: float) -> Readings | NoData:
            answer = super().read(now)
            if isinstance(answer, NoData):
                return answer
            return replace(answer, gpu_utilisation_ratio=0.5)

    clock, cards = Clock(), Cards("nvml", 300.0, Coverage.GPU)
    sampler = SensorSampler([cards], MODEL, clock=clock)
    steps(sampler, clock, 1.0)
    assert sampler.readings.gpu_utilisation_ratio == 0.5
    cards.watts = None
    steps(sampler, clock, 1.0)
    assert sampler.readings.gpu_utilisation_ratio is None


def test_state_sensor_that_raises_is_unknown_and_stops_nothing() -> None:
    clock, board, host = Clock(), FakeState("board", is_throttled=True), FakeState()
    sampler = SensorSampler([FakeSensor()], MODEL, [board, host], clock=clock)
    steps(sampler, clock, 1.0)
    assert sampler.readings.is_throttled is True
    board.error = OSError("I2C")
    steps(sampler, clock, 1.5)
    assert sampler.readings.is_throttled is None
    assert sampler.power().source == "ina3221"
    (status,) = [status for status in sampler.sensors if status.name == "board"]
    assert (status.is_working, status.reason) == (False, "OSError: I2C")


def test_status_of_sensors_says_what_works_how_long_it_takes_and_what_to_mend() -> None:
    clock = Clock()

    class Slow(FakeSensor):
        def read(self, now: float) -> Readings | NoData:
            clock.now += 0.002
            return super().read(now)

    absent = FakeSensor("rapl", coverage=Coverage.PACKAGE)
    absent.error = ImportError("no such hardware")  # nothing that an operator could mend
    broken = FakeSensor("pmic", watts=None)
    sampler = SensorSampler([absent, broken, Slow("nvml", 50.0, Coverage.GPU)], MODEL, clock=clock)
    steps(sampler, clock, 1.0)
    working, mendable = sampler.sensors
    assert (working.name, working.is_working, working.is_used) == ("nvml", True, True)
    assert working.read_seconds == pytest.approx(0.002)
    assert (mendable.name, mendable.is_working, mendable.is_used) == ("pmic", False, False)
    assert (mendable.reason, mendable.fix) == ("gone", "plug it in")


def test_state_is_known_once_the_thread_has_started() -> None:
    host = FakeState(memory_available_bytes=1000)
    sampler = SensorSampler([], MODEL, [host])
    sampler.start()
    assert sampler.readings.memory_available_bytes == 1000
    sampler.close()
