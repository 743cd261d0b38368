"""Every power sensor keeps its contract on every board."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_agent.sensors.base import ESTIMATE, Coverage, NoData, Readings, Sensor
from edge_agent.sensors.power_model import power_model
from edge_agent.sensors.sampler import SensorSampler, guarded_read, probe
from edge_agent.sensors.sources import (
    POWER_SENSORS,
    KnownSensor,
    Surroundings,
    power_sensors,
    state_sensors,
)
from tests.fakes.sensors import power_of
from tests.fixtures.sysfs.boards import BOARDS, SENSORS_OF, surroundings, write

Make = Callable[[Path], Sensor]
Board = tuple[str, Path]


@pytest.fixture(params=BOARDS)
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    name = str(request.param)
    return name, write(tmp_path, BOARDS[name]())


@pytest.fixture(params=POWER_SENSORS, ids=lambda source: _name(source))
def make(request: pytest.FixtureRequest) -> Make:
    source: KnownSensor = request.param
    return lambda root: source.make(surroundings(root))


def _name(source: KnownSensor) -> str:
    return source.make(Surroundings()).name


def check(answer: Readings | NoData, now: float) -> None:
    """What holds for every answer: unknown is never 0, and what is known says where from."""
    if isinstance(answer, NoData):
        assert answer.reason
        return
    assert answer.measured_at == now
    power = power_of(answer)
    assert isinstance(power.coverage, Coverage)
    assert 0 < power.relative_error < 1
    assert power.power_watts is None or 0 <= power.power_watts < 10_000
    assert power.energy_joules is None or power.energy_joules >= 0
    assert power.detail


def test_sensor_works_on_its_own_boards_and_says_why_on_others(make: Make, board: Board) -> None:
    sensor = make(board[1])
    assert sensor.name not in ("", "none", ESTIMATE)
    assert 0 < sensor.period_seconds <= 1.0
    for now in (1.0, 2.0):
        answer = sensor.read(now)
        check(answer, now)
        assert isinstance(answer, Readings) is (sensor.name in SENSORS_OF.get(board[0], ()))
    sensor.close()
    sensor.close()


def test_counter_never_falls(make: Make, board: Board) -> None:
    sensor = make(board[1])
    joules = [
        answer.power.energy_joules
        for now in range(5)
        if isinstance(answer := sensor.read(float(now)), Readings)
        and answer.power is not None
        and answer.power.energy_joules is not None
    ]
    assert joules == sorted(joules)
    sensor.close()


@pytest.mark.parametrize("text", ["", "nonsense\n", "-256000\n", "\udcff"])
def test_files_full_of_nonsense_raise_nothing(make: Make, board: Board, text: str) -> None:
    root = board[1]
    sensor = make(root)
    sensor.read(0.0)
    for path in list(root.rglob("*")):
        if path.is_file() and "device-tree" not in path.as_posix():
            path.write_bytes(text.encode(errors="surrogateescape"))
    for now in (1.0, 2.0):
        check(sensor.read(now), now)
    sensor.close()


def test_tree_that_vanishes_raises_nothing(make: Make, board: Board) -> None:
    """Unbound drivers, an unmounted /sys."""
    sensor = make(board[1])
    sensor.read(0.0)
    shutil.rmtree(board[1])
    for now in (1.0, 2.0):
        assert isinstance(guarded_read(sensor, now), NoData)
    sensor.close()


def test_best_working_source_is_chosen_on_every_board(board: Board) -> None:
    """And where there is none, the start succeeds all the same."""
    name, root = board
    chosen, refused = probe(power_sensors(surroundings(root)), 0.0)
    assert tuple(sensor.name for sensor in chosen) == SENSORS_OF.get(name, ())
    assert all(answer.reason for answer in refused.values())


def test_power_of_every_board_names_its_source(board: Board) -> None:
    """Measured where there is a sensor, else an estimate that says so."""
    name, root = board
    now = 0.0
    model = power_model("Raspberry Pi 4 Model B", 4, None, None)
    place = surroundings(root)
    sampler = SensorSampler(power_sensors(place), model, state_sensors(place), clock=lambda: now)
    for _ in range(20):
        now += sampler.step()
        for counter in root.rglob("energy_uj"):  # 10 W for each package
            counter.write_text(str(int(now * 10e6)))
    power = sampler.power()
    is_measured = name in SENSORS_OF
    assert power.power_watts is not None
    assert power.power_watts > 0
    assert (power.source == ESTIMATE) is not is_measured
    assert power.coverage is not None
    assert power.relative_error is not None
    assert (power.relative_error > 0.3) is not is_measured, "a guess has a wide error bar"
    assert power.sample_hertz is not None
    assert power.age_seconds is not None
    totals = sampler.totals()
    assert totals.total_joules > 0
    assert totals.requests_joules + totals.idle_joules == totals.total_joules
    assert (totals.measured_seconds > totals.estimated_seconds) is is_measured
    sampler.close()


def test_names_of_sensors_are_unique() -> None:
    """A name is the source of joules on the wire and a label of metrics."""
    place = Surroundings()
    names = [sensor.name for sensor in (*state_sensors(place), *power_sensors(place))]
    assert len({*names}) == len(names)
