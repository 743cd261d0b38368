"""What the doctor says of sensors."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_agent.sensors.base import NoData, Readings, Sensor
from edge_agent.sensors.diagnosis import SensorFinding, examine_sensors
from edge_agent.sensors.jetson import JetsonSensor, JtopSensor
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.rapl import RAPL_FIX, RaplSensor
from edge_agent.sensors.raspberry_pi import CommandError, PmicSensor
from tests.fixtures.sysfs.boards import orin_nano, pi_4, pi_5, write, x86_rapl, x86_vm

MODEL = PowerModel(3.0, 12.0)


def refuse(argument: str) -> str:
    raise CommandError("Can't open device file: /dev/vcio")


def examine(
    root: Path, *sensors: Sensor, wait: Callable[[float], None] = lambda seconds: None
) -> list[SensorFinding]:
    return examine_sensors(sensors, MODEL, "pointsman", root, refuse, wait)


def warnings(found: list[SensorFinding]) -> list[SensorFinding]:
    assert all(entry.fix for entry in found if entry.level != "ok")
    return [entry for entry in found if entry.level != "ok"]


def test_working_sensor_is_shown_with_what_it_covers(tmp_path: Path) -> None:
    found = examine(tmp_path, JetsonSensor(write(tmp_path, orin_nano())))
    assert warnings(found) == []
    assert found[0].text.startswith("ina3221: 8.1 W, board (VDD_IN), ±5 %; a reading takes ")
    assert found[0].text.endswith(" ms and comes every 0.1 s")


def test_pmic_without_permission_names_the_group_and_the_user(tmp_path: Path) -> None:
    found = examine(tmp_path, PmicSensor(write(tmp_path, pi_5()), run=refuse))
    (warning,) = warnings(found)
    assert "/dev/vcio" in warning.text
    assert "usermod -aG video pointsman" in warning.fix


def test_rapl_without_permission_names_the_rule_and_the_user(tmp_path: Path) -> None:
    class Refused(RaplSensor):
        def read(self, now: float) -> Readings | NoData:
            return NoData("energy_uj: permission denied (root only)", RAPL_FIX)

    found = examine(tmp_path, Refused(write(tmp_path, x86_rapl())))
    (warning,) = warnings(found)
    assert "usermod -aG rapl pointsman" in warning.fix
    assert any("estimated between 3 W idle and 12 W busy" in entry.text for entry in found)


@pytest.mark.parametrize("error", [PermissionError("/run/jtop.sock"), RuntimeError("version")])
def test_jtop_that_cannot_be_used_names_group_and_version(tmp_path: Path, error: Exception) -> None:
    def connect() -> object:
        raise error

    (warning,) = warnings(examine(write(tmp_path, x86_vm()), JtopSensor(connect), wait=time.sleep))
    assert str(error) in warning.text
    assert "usermod -aG jtop pointsman" in warning.fix


def test_machine_without_sensors_has_nothing_to_mend(tmp_path: Path) -> None:
    """An estimate, and said to be one."""
    found = examine(tmp_path, RaplSensor(write(tmp_path, x86_vm())))
    assert [entry.level for entry in found] == ["ok"]
    assert "estimated" in found[0].text


def test_pi_that_was_throttled_is_told_what_to_do(tmp_path: Path) -> None:
    """Under-voltage now, and heat since boot."""
    write(tmp_path, pi_4())
    (tmp_path / "sys/devices/platform/soc/soc:firmware/get_throttled").write_text("50001\n")
    found = warnings(examine(tmp_path))
    assert [entry.text for entry in found] == [
        "the board is slowed down (now): under_voltage",
        "the board is slowed down (since boot): throttled",
    ]
