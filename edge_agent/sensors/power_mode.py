"""The power mode that a board is in, since it decides how fast and how frugal the board is."""

import re
from pathlib import Path
from typing import Final

from edge_agent.sensors.sysfs import read_text

_NVPMODEL_STATUS: Final = "var/lib/nvpmodel/status"
_NVPMODEL_SETTINGS: Final = "etc/nvpmodel.conf"
_PROFILE: Final = "sys/firmware/acpi/platform_profile"
_GOVERNOR: Final = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"

_MODE_NUMBER: Final = re.compile(r"pmode:(\d+)")
_MODE_NAME: Final = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>")


def read_power_mode(root: Path = Path("/")) -> str:
    """The mode's name, such as nvpmodel's "15W" or "balanced/powersave"; "" where there is none.

    A Jetson's mode is what nvpmodel last set, by its own file, so no process is started. Elsewhere
    it is the platform profile that the firmware offers and the processor's frequency governor,
    those of them that exist.

    Args:
        root: of the file system that is read; tests give a captured tree.
    """
    status = read_text(root / _NVPMODEL_STATUS)
    number = None if status is None else _MODE_NUMBER.search(status)
    if number is not None:
        return _nvpmodel_name(root, int(number[1]))
    found = (read_text(root / _PROFILE), read_text(root / _GOVERNOR))
    return "/".join(text for text in found if text)


def _nvpmodel_name(root: Path, number: int) -> str:
    """What the board's settings call this mode; "mode N" where they do not say."""
    try:  # longer than a sysfs file
        text = (root / _NVPMODEL_SETTINGS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = {int(found[1]): found[2] for found in _MODE_NAME.finditer(text)}
    return names.get(number, f"mode {number}")
