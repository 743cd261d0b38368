"""The power controller of a Pi 5 and every Pi's throttle flags."""

from pathlib import Path

import pytest

from edge_agent.sensors.base import Coverage, NoData
from edge_agent.sensors.raspberry_pi import (
    CommandError,
    PmicSensor,
    parse_throttled,
    rail_watts,
    read_throttling,
    vcgencmd,
)
from tests.fakes.sensors import power_of
from tests.fixtures.sysfs.boards import OLD_PMIC_OUTPUT, PMIC_OUTPUT, pi_4, pi_5, write


@pytest.mark.parametrize("text", [PMIC_OUTPUT, OLD_PMIC_OUTPUT])
def test_both_forms_give_the_rails_that_have_current_and_voltage(text: str) -> None:
    watts = rail_watts(text)
    assert watts == pytest.approx({"3V7_WL_SW": 0.37, "3V3_SYS": 0.66, "VDD_CORE": 1.5})


def test_sum_is_scaled_to_the_wall_and_partial(tmp_path: Path) -> None:
    sensor = PmicSensor(write(tmp_path, pi_5()), run=lambda argument: PMIC_OUTPUT)
    reading = power_of(sensor.read(5.0))
    assert reading.power_watts == pytest.approx(1.145 * 2.53 + 0.588)
    assert reading.coverage is Coverage.PARTIAL
    assert sensor.period_seconds >= 0.5


def test_operator_sets_scale_and_offset(tmp_path: Path) -> None:
    sensor = PmicSensor(write(tmp_path, pi_5()), 1.0, 0.0, lambda argument: PMIC_OUTPUT)
    reading = power_of(sensor.read(5.0))
    assert reading.power_watts == pytest.approx(2.53)


def test_pi_4_has_no_current_sensing_and_is_never_asked(tmp_path: Path) -> None:
    def refuse(argument: str) -> str:
        raise AssertionError("a Pi 4 was asked for its PMIC")

    answer = PmicSensor(write(tmp_path, pi_4()), run=refuse).read(0.0)
    assert isinstance(answer, NoData)
    assert answer.fix == ""


def test_command_that_is_not_permitted_names_the_group(tmp_path: Path) -> None:
    def refuse(argument: str) -> str:
        raise CommandError("Can't open device file: /dev/vcio")

    answer = PmicSensor(write(tmp_path, pi_5()), run=refuse).read(0.0)
    assert isinstance(answer, NoData)
    assert "usermod -aG video" in answer.fix


def test_command_that_is_missing_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CommandError, match="not installed") as caught:
        vcgencmd("get_throttled")
    assert caught.value.is_missing


def test_answer_without_rails_is_no_data(tmp_path: Path) -> None:
    answer = PmicSensor(write(tmp_path, pi_5()), run=lambda argument: "EXT5V_V volt(24)=5V").read(0)
    assert isinstance(answer, NoData)


def test_low_bits_are_now_and_high_bits_since_boot() -> None:
    found = parse_throttled("throttled=0x50005\n")
    assert found is not None
    assert found.now == ("under_voltage", "throttled")
    assert found.since_boot == ("under_voltage", "throttled")
    assert parse_throttled("0") is not None
    assert parse_throttled("VCHI initialization failed") is None


def test_under_voltage_alarm_serves_where_the_firmware_does_not(tmp_path: Path) -> None:
    write(tmp_path, pi_5())

    def refuse(argument: str) -> str:
        raise CommandError("no")

    assert read_throttling(tmp_path, refuse) == parse_throttled("0x0")
    (tmp_path / "sys/class/hwmon/hwmon2/in0_lcrit_alarm").write_text("1\n")
    found = read_throttling(tmp_path, refuse)
    assert found is not None
    assert found.now == ("under_voltage",)
