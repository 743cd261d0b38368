"""Jetson rails, loads and the jetson-stats service."""

import threading
from pathlib import Path
from typing import Any

import pytest

from edge_agent.sensors.base import Coverage, NoData, PowerReading, Readings
from edge_agent.sensors.jetson import (
    JetsonSensor,
    JtopSensor,
    Rail,
    board_power,
    gpu_load_ratio,
)
from tests.fakes.sensors import first_word, power_of
from tests.fixtures.sysfs.boards import agx_orin, nano, orin_nano, write, x86_vm


def read(sensor: JetsonSensor) -> PowerReading:
    return power_of(sensor.read(1.0))


def test_input_rail_is_the_board_and_the_others_are_not_added(tmp_path: Path) -> None:
    sensor = JetsonSensor(write(tmp_path, orin_nano()))
    for _ in range(2):  # the second reading opens only the files that count
        reading = read(sensor)
        assert reading.power_watts == pytest.approx(8.064)
        assert (reading.coverage, reading.detail) == (Coverage.BOARD, "VDD_IN")


def test_agx_sums_its_rails_once_and_calls_it_partial(tmp_path: Path) -> None:
    """VDDQ hangs behind VIN_SYS_5V0; NC and the chip's own sum are no rails."""
    sensor = JetsonSensor(write(tmp_path, agx_orin()))
    for _ in range(2):
        reading = read(sensor)
        assert reading.power_watts == pytest.approx(3.8 + 1.9 + 4.0)
        assert reading.coverage is Coverage.PARTIAL
        assert sensor.name == "ina3221"


def test_jetpack_4_is_read_through_iio(tmp_path: Path) -> None:
    reading = read(JetsonSensor(write(tmp_path, nano())))
    assert reading.power_watts == pytest.approx(2.543)
    assert reading.coverage is Coverage.BOARD


def test_unknown_board_sums_all_its_rails_and_calls_it_partial() -> None:
    watts, coverage, _ = board_power([Rail("VDD_NEW", 2.0), Rail("VDD_OTHER", 3.0)])
    assert (watts, coverage) == (5.0, Coverage.PARTIAL)


def test_rail_that_disappears_is_no_data_and_comes_back(tmp_path: Path) -> None:
    sensor = JetsonSensor(write(tmp_path, orin_nano()))
    read(sensor)
    current = tmp_path / "sys/class/hwmon/hwmon1/curr1_input"
    kept = current.read_text()
    current.unlink()
    answer = sensor.read(2.0)
    assert isinstance(answer, NoData)
    assert answer.fix
    current.write_text(kept)
    assert read(sensor).power_watts == pytest.approx(8.064)


def test_hwmon_is_found_by_name_whatever_its_number(tmp_path: Path) -> None:
    write(tmp_path, orin_nano())
    (tmp_path / "sys/class/hwmon/hwmon1").rename(tmp_path / "sys/class/hwmon/hwmon9")
    assert read(JetsonSensor(tmp_path)).power_watts == pytest.approx(8.064)


def test_gpu_load_is_per_mille_and_unknown_elsewhere(tmp_path: Path) -> None:
    """Its place moved between releases."""
    assert gpu_load_ratio(write(tmp_path / "a", orin_nano())) == pytest.approx(0.412)
    assert gpu_load_ratio(write(tmp_path / "b", nano())) == 0.0
    assert gpu_load_ratio(write(tmp_path / "c", x86_vm())) is None


# -- jtop ----------------------------------------------------------------------------------------


class Service:
    """A jtop client that gives what it is told, one answer for each `step`."""

    def __init__(self) -> None:
        self.power: Any = {
            "rail": {"VDD_SOC": {"power": 1500, "online": True}},
            "tot": {"power": 8000},
        }
        self.stats: dict[str, object] = {"uptime": 1}
        self._steps = threading.Semaphore(1)
        self.is_open = True

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def ok(self) -> bool:
        self._steps.acquire(timeout=10.0)
        return self.is_open

    def end(self) -> None:
        self.is_open = False
        self._steps.release()


def test_jtop_total_is_the_input_rail() -> None:
    service = Service()
    sensor = JtopSensor(lambda: service)
    sensor.read(0.0)
    reading = power_of(first_word(sensor, 1.0))
    service.end()
    assert (sensor.name, reading.coverage) == ("jtop", Coverage.BOARD)
    assert reading.power_watts == pytest.approx(8.0)


def test_jtop_figures_whose_time_stands_still_are_not_taken() -> None:
    service = Service()
    sensor = JtopSensor(lambda: service, stale_seconds=3.0)
    sensor.read(0.0)
    assert isinstance(first_word(sensor, 1.0), Readings)
    assert isinstance(sensor.read(2.9), Readings)
    answer = sensor.read(4.1)
    service.end()
    assert isinstance(answer, NoData)
    assert "stopped answering" in answer.reason


def test_jtop_that_hangs_in_connecting_holds_nothing_up() -> None:
    release = threading.Event()

    def connect() -> Service:
        release.wait(10.0)
        raise ConnectionError

    sensor = JtopSensor(connect, stale_seconds=3.0)
    assert isinstance(sensor.read(0.0), NoData)
    answer = sensor.read(10.0)
    release.set()
    assert isinstance(answer, NoData)
    assert answer.fix


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("[Errno 13] Permission denied: '/run/jtop.sock'"),
        RuntimeError("Mismatch version jtop service: [4.3] and client: [7.2]"),
    ],
)
def test_jtop_that_cannot_be_used_names_the_fix(error: Exception) -> None:
    """The group and the mount, or the version."""

    def connect() -> Service:
        raise error

    sensor = JtopSensor(connect)
    answer = first_word(sensor, 1.0)
    assert isinstance(answer, NoData)
    assert str(error) in answer.reason
    assert "usermod -aG jtop" in answer.fix
    assert "same jetson-stats version" in answer.fix


def test_jetson_stats_that_is_not_installed_is_nothing_to_mend() -> None:
    def connect() -> Service:
        raise ImportError

    sensor = JtopSensor(connect)
    answer = first_word(sensor, 1.0)
    assert isinstance(answer, NoData)
    assert answer.fix == ""


@pytest.mark.parametrize("power", [{}, {"rail": {"X": {"power": "OFF"}}}, None, {"rail": [1]}])
def test_jtop_figures_of_an_unknown_form_are_no_data(power: object) -> None:
    service = Service()
    service.power = power
    sensor = JtopSensor(lambda: service)
    answer = first_word(sensor, 1.0)
    service.end()
    assert isinstance(answer, NoData)
