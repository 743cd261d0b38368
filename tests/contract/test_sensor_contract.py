"""Every power sensor keeps its contract on every board."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_agent.sensors.base import ESTIMATE, Coverage, NoData, Reading, Sensor
from edge_agent.sensors.jetson import JetsonSensor, JtopSensor
from edge_agent.sensors.nvml import NvmlSensor
from edge_agent.sensors.power_model import power_model
from edge_agent.sensors.rapl import RaplSensor
from edge_agent.sensors.raspberry_pi import CommandError, PmicSensor
from edge_agent.sensors.sampler import PowerSampler, guarded_read, probe
from tests.fixtures.sysfs.boards import BOARDS, PMIC_OUTPUT, write


def firmware(root: Path) -> Callable[[str], str]:
    """vcgencmd as this board has it."""

    def run(argument: str) -> str:
        if "Raspberry Pi 5" in (root / "proc/device-tree/model").read_text():
            return PMIC_OUTPUT
        raise CommandError("vcgencmd is not installed", is_missing=True)

    return run


def no_module() -> object:
    raise ImportError


SENSORS: dict[str, Callable[[Path], Sensor]] = {
    "ina3221": JetsonSensor,
    "pmic": lambda root: PmicSensor(root, run=firmware(root)),
    "rapl": RaplSensor,
    "nvml": lambda root: NvmlSensor(no_module),
    "jtop": lambda root: JtopSensor(no_module),
}

WORKS = {
    ("ina3221", "orin-nano"),
    ("ina3221", "agx-orin"),
    ("ina3221", "nano"),
    ("pmic", "pi-5"),
    ("rapl", "x86-rapl"),
}


@pytest.fixture(params=BOARDS)
def board(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name = str(request.param)
    return name, write(tmp_path, BOARDS[name]())


@pytest.fixture(params=SENSORS)
def make(request: pytest.FixtureRequest) -> tuple[str, Callable[[Path], Sensor]]:
    return str(request.param), SENSORS[request.param]


Make = tuple[str, Callable[[Path], Sensor]]
Board = tuple[str, Path]


def check(answer: Reading | NoData, now: float) -> None:
    """What holds for every answer: unknown is never 0, and what is known says where from."""
    if isinstance(answer, NoData):
        assert answer.reason
        return
    assert isinstance(answer.source, str)
    assert answer.source != ESTIMATE
    assert isinstance(answer.coverage, Coverage)
    assert 0 < answer.relative_error < 1
    assert answer.measured_at == now
    assert answer.power_watts is None or 0 <= answer.power_watts < 10_000
    assert answer.energy_joules is None or answer.energy_joules >= 0
    assert answer.detail


def test_sensor_works_on_its_own_boards_and_says_why_on_others(make: Make, board: Board) -> None:
    """Cases D7, D16."""
    name, make_sensor = make
    sensor = make_sensor(board[1])
    assert sensor.name == name
    assert 0 < sensor.period_seconds <= 1.0
    for now in (1.0, 2.0):
        answer = sensor.read(now)
        check(answer, now)
        assert isinstance(answer, Reading) is ((name, board[0]) in WORKS)
    sensor.close()
    sensor.close()


def test_counter_never_falls(make: Make, board: Board) -> None:
    sensor = make[1](board[1])
    joules = [
        answer.energy_joules
        for now in range(5)
        if isinstance(answer := sensor.read(float(now)), Reading)
        and answer.energy_joules is not None
    ]
    assert joules == sorted(joules)
    sensor.close()


@pytest.mark.parametrize("text", ["", "nonsense\n", "-256000\n", "\udcff"])
def test_files_full_of_nonsense_raise_nothing(make: Make, board: Board, text: str) -> None:
    """Case D7."""
    root = board[1]
    sensor = make[1](root)
    sensor.read(0.0)
    for path in list(root.rglob("*")):
        if path.is_file() and "device-tree" not in path.as_posix():
            path.write_bytes(text.encode(errors="surrogateescape"))
    for now in (1.0, 2.0):
        check(sensor.read(now), now)
    sensor.close()


def test_tree_that_vanishes_raises_nothing(make: Make, board: Board) -> None:
    """Case D7: unbound drivers, an unmounted /sys."""
    sensor = make[1](board[1])
    sensor.read(0.0)
    shutil.rmtree(board[1])
    for now in (1.0, 2.0):
        assert isinstance(guarded_read(sensor, now), NoData)
    sensor.close()


def test_best_working_source_is_chosen_on_every_board(board: Board) -> None:
    """Cases D11, D16: and where there is none, the start succeeds all the same."""
    name, root = board
    chosen, refused = probe([make(root) for make in SENSORS.values()], 0.0)
    expected = [sensor for sensor, where in WORKS if where == name]
    assert [sensor.name for sensor in chosen] == expected
    assert all(answer.reason for answer in refused.values())


def test_power_of_every_board_names_its_source(board: Board) -> None:
    """Case D11: measured where there is a sensor, else an estimate that says so."""
    name, root = board
    now = 0.0
    model = power_model("Raspberry Pi 4 Model B", 4, None, None)
    sampler = PowerSampler([make(root) for make in SENSORS.values()], model, clock=lambda: now)
    for _ in range(20):
        now += sampler.step()
        for counter in root.rglob("energy_uj"):  # 10 W for each package
            counter.write_text(str(int(now * 10e6)))
    power = sampler.power()
    is_measured = any(where == name for _, where in WORKS)
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
