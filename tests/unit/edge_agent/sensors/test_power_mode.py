"""The board's power mode."""

from pathlib import Path

import pytest

from edge_agent.sensors.board import BoardSensor
from edge_agent.sensors.power_mode import read_power_mode
from tests.fixtures.sysfs.boards import BOARDS, write

NVPMODEL = """\
# Modes of this board
< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=10W >
< POWER_MODEL ID=2 NAME=15W >
< PM_CONFIG DEFAULT=2 >
"""


@pytest.mark.parametrize(
    ("tree", "mode"),
    [
        ({"var/lib/nvpmodel/status": "pmode:0002\n", "etc/nvpmodel.conf": NVPMODEL}, "15W"),
        ({"var/lib/nvpmodel/status": "pmode:0000", "etc/nvpmodel.conf": NVPMODEL}, "MAXN"),
        ({"var/lib/nvpmodel/status": "pmode:0007", "etc/nvpmodel.conf": NVPMODEL}, "mode 7"),
        ({"var/lib/nvpmodel/status": "pmode:0001"}, "mode 1"),
        ({"var/lib/nvpmodel/status": "nonsense"}, ""),
        ({"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "ondemand\n"}, "ondemand"),
        (
            {
                "sys/firmware/acpi/platform_profile": "balanced\n",
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            },
            "balanced/powersave",
        ),
        ({}, ""),
    ],
)
def test_mode_is_what_the_board_calls_it(tmp_path: Path, tree: dict[str, str], mode: str) -> None:
    """A board without nvpmodel has no mode of it, and no error."""
    root = write(tmp_path, tree)
    assert read_power_mode(root) == mode
    assert BoardSensor(root).read(0.0).power_mode == mode


@pytest.mark.parametrize(
    ("board", "mode"),
    [("orin-nano", "15W"), ("agx-orin", "MODE_30W"), ("nano", "5W"), ("pi-5", "ondemand")],
)
def test_boards_of_the_fixtures_have_their_modes(tmp_path: Path, board: str, mode: str) -> None:
    assert read_power_mode(write(tmp_path, BOARDS[board]())) == mode
