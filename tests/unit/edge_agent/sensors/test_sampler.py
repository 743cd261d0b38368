"""The sampler, a step at a time on a clock of its own."""

import threading
import time
from pathlib import Path

import pytest

from edge_agent.sensors.base import ESTIMATE, Coverage, NoData, Reading
from edge_agent.sensors.board import BoardSensor
from edge_agent.sensors.energy import Work
from edge_agent.sensors.jetson import JetsonSensor
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.sampler import PowerSampler, probe
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
        name: str = "fake",
        watts: float | None = 10.0,
        coverage: Coverage = Coverage.BOARD,
        source: str = "ina3221",
    ) -> None:
        self.name = name
        self.watts = watts
        self.coverage = coverage
        self.source = source
        self.error: Exception | None = None
        self.reads = 0
        self.is_closed = False

    def read(self, now: float) -> Reading | NoData:
        self.reads += 1
        if self.error is not None:
            raise self.error
        if self.watts is None:
            return NoData("gone", "plug it in")
        return Reading(self.source, self.coverage, 0.05, now, self.watts, detail="a rail")

    def close(self) -> None:
        self.is_closed = True


def steps(sampler: PowerSampler, clock: Clock, seconds: float) -> None:
    end = clock.now + seconds
    while clock.now < end:
        clock.now += sampler.step()


def test_board_sensor_wins_over_parts_of_the_machine() -> None:
    package = FakeSensor("rapl", coverage=Coverage.PACKAGE)
    board = FakeSensor("ina3221")
    assert probe([package, board], 0.0)[0] == [board]


def test_package_and_cards_are_added(tmp_path: Path) -> None:
    clock = Clock()
    package = FakeSensor("rapl", 30.0, Coverage.PACKAGE, "rapl")
    cards = FakeSensor("nvml", 300.0, Coverage.GPU, "nvml")
    sampler = PowerSampler([package, cards], MODEL, clock=clock)
    steps(sampler, clock, 3.0)
    power = sampler.power()
    assert power.power_watts == pytest.approx(330.0)
    assert (power.source, power.coverage) == ("nvml", Coverage.PARTIAL)


def test_source_in_name_only_is_not_chosen_and_the_start_succeeds() -> None:
    """Cases D9, D16."""
    dead = FakeSensor("nvml", coverage=Coverage.GPU)
    dead.error = RuntimeError("Not Supported")
    alive = FakeSensor("rapl", coverage=Coverage.PACKAGE)
    chosen, refused = probe([dead, alive], 0.0)
    assert chosen == [alive]
    assert "Not Supported" in refused["nvml"].reason


def test_sensor_that_raises_stops_nothing_and_the_model_takes_over() -> None:
    """Case D7."""
    clock, sensor = Clock(), FakeSensor()
    sampler = PowerSampler([sensor], MODEL, clock=clock)
    steps(sampler, clock, 1.0)
    assert sampler.power().source == "ina3221"
    sensor.error = ValueError("a kernel bug")
    steps(sampler, clock, 2.0)
    assert sampler.power().source == ESTIMATE
    assert sampler.totals().estimated_seconds > 0


def test_lost_sensor_is_probed_with_back_off_and_taken_again() -> None:
    clock, sensor = Clock(), FakeSensor(watts=None)
    sampler = PowerSampler([sensor], MODEL, clock=clock)
    steps(sampler, clock, 1000.0)
    assert sensor.reads < 30
    assert sampler.unreadable == ["fake: gone; fix: plug it in"]
    sensor.watts = 7.0
    steps(sampler, clock, 61.0)
    assert sampler.power().power_watts == pytest.approx(7.0)
    assert sampler.unreadable == []


def test_second_source_that_is_mended_is_taken_within_a_minute() -> None:
    """A driver of the cards that comes back, beside a package that was measured all along."""
    clock = Clock()
    package = FakeSensor("rapl", 30.0, Coverage.PACKAGE, "rapl")
    cards = FakeSensor("nvml", None, Coverage.GPU, "nvml")
    sampler = PowerSampler([package, cards], MODEL, clock=clock)
    steps(sampler, clock, 3.0)
    assert sampler.power().source == "rapl"
    cards.watts = 300.0
    steps(sampler, clock, 65.0)
    assert sampler.power().power_watts == pytest.approx(330.0)
    assert cards.reads < 100


def test_answer_is_charged_from_what_was_measured() -> None:
    clock, sensor = Clock(), FakeSensor(watts=10.0)
    sampler = PowerSampler([sensor], MODEL, clock=clock)
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
    """Case D11: an estimate, and labelled as one."""
    clock = Clock()
    sampler = PowerSampler([], MODEL, clock=clock)
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
    sampler = PowerSampler([], None, clock=clock)
    steps(sampler, clock, 3.0)
    power = sampler.power()
    assert (power.power_watts, power.source) == (None, None)
    assert sampler.charge("small", Work(0.0, 1.0, 1.0)) is None


def test_wall_clock_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D5: a jump of the wall clock cannot matter to who never looks at it."""

    def refuse() -> float:
        raise AssertionError("the wall clock was asked")

    monkeypatch.setattr(time, "time", refuse)
    clock = Clock()
    sampler = PowerSampler([FakeSensor()], MODEL, clock=clock)
    steps(sampler, clock, 1.0)
    assert sampler.totals().total_joules > 0


def test_readings_are_timed_by_the_monotonic_clock() -> None:
    """Case D5."""
    seen: list[float] = []

    class Timed(FakeSensor):
        def read(self, now: float) -> Reading | NoData:
            seen.append(now)
            return super().read(now)

    before = time.monotonic()
    PowerSampler([Timed()], MODEL).step()
    assert seen
    assert all(before <= now <= time.monotonic() for now in seen)


def test_throttling_of_the_board_is_passed_on(tmp_path: Path) -> None:
    """Case D15."""
    write(tmp_path, pi_4())
    (tmp_path / "sys/devices/platform/soc/soc:firmware/get_throttled").write_text("4\n")
    sampler = PowerSampler([], MODEL, BoardSensor(tmp_path), clock=Clock())
    sampler.step()
    assert sampler.board.is_throttled is True


def test_jetson_is_read_ten_times_a_second(tmp_path: Path) -> None:
    """Case D17."""
    clock = Clock()
    sampler = PowerSampler([JetsonSensor(write(tmp_path, orin_nano()))], MODEL, clock=clock)
    steps(sampler, clock, 5.0)
    power = sampler.power()
    assert power.sample_hertz == pytest.approx(10.0)
    assert power.power_watts == pytest.approx(8.064)


def test_thread_starts_reads_and_ends() -> None:
    class Signalling(FakeSensor):
        def __init__(self) -> None:
            super().__init__()
            self.was_read = threading.Event()

        def read(self, now: float) -> Reading | NoData:
            self.was_read.set()
            return super().read(now)

    sensor = Signalling()
    sampler = PowerSampler([sensor], MODEL)
    sampler.start()
    assert sensor.was_read.wait(10.0)
    sampler.close()
    assert sensor.is_closed
    assert "sensors" not in {thread.name for thread in threading.enumerate()}
