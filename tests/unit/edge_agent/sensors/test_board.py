"""Temperature and throttling of boards."""

from pathlib import Path

import pytest

from edge_agent.sensors.base import Readings
from edge_agent.sensors.board import BoardSensor
from edge_agent.sensors.raspberry_pi import CommandError
from tests.fixtures.sysfs.boards import BOARDS, orin_nano, pi_4, pi_5, write, x86_rapl


def no_command(argument: str) -> str:
    raise CommandError("vcgencmd is not installed", is_missing=True)


def state(
    celsius: float | None,
    is_throttled: bool | None,
    gpu_ratio: float | None = None,
    power_mode: str = "",
) -> Readings:
    return Readings(
        0.0,
        temperature_celsius=celsius,
        is_throttled=is_throttled,
        gpu_utilisation_ratio=gpu_ratio,
        power_mode=power_mode,
    )


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        ("pi-4", state(51.608, False, power_mode="ondemand")),
        ("pi-5", state(48.8, False, power_mode="ondemand")),
        ("orin-nano", state(49.031, False, 0.412, "15W")),
        ("agx-orin", state(45.5, False, 0.0, "MODE_30W")),
        ("nano", state(36.5, None, 0.0, "5W")),
        ("x86-rapl", state(55.0, False)),
        ("x86-vm", state(None, None)),
    ],
)
def test_board_says_what_it_can_and_no_more(tmp_path: Path, board: str, expected: Readings) -> None:
    """Every field is optional."""
    sensor = BoardSensor(write(tmp_path, BOARDS[board]()), no_command)
    assert sensor.read(0.0) == expected


def test_throttled_pi_says_so_and_why(tmp_path: Path) -> None:
    write(tmp_path, pi_4())
    (tmp_path / "sys/devices/platform/soc/soc:firmware/get_throttled").write_text("e0008\n")
    state = BoardSensor(tmp_path, no_command).read(0.0)
    assert state.is_throttled
    assert state.limits == ("soft_temperature_limit",)


def test_firmware_is_asked_every_five_seconds_only(tmp_path: Path) -> None:
    """Each question starts a process."""
    asked = []

    def run(argument: str) -> str:
        asked.append(argument)
        return "throttled=0x4"

    sensor = BoardSensor(write(tmp_path, pi_5()), run)
    states = [sensor.read(now) for now in (0.0, 1.0, 4.9, 5.0)]
    assert all(state.is_throttled for state in states)
    assert asked == ["get_throttled"] * 2


@pytest.mark.parametrize(
    ("board", "counter"),
    [
        (orin_nano, "sys/class/hwmon/hwmon0/oc1_event_cnt"),
        (x86_rapl, "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count"),
    ],
)
def test_events_since_the_last_look_are_throttling(
    tmp_path: Path, board: object, counter: str
) -> None:
    """Old events are none."""
    assert callable(board)
    sensor = BoardSensor(write(tmp_path, board()), no_command)
    assert sensor.read(0.0).is_throttled is False
    (tmp_path / counter).write_text("9\n")
    assert sensor.read(1.0).is_throttled is True
    assert sensor.read(2.0).is_throttled is False
