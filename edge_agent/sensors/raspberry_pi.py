"""Power, throttling and under-voltage of Raspberry Pi boards."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_agent.sensors.base import Coverage, NoData, PowerReading, Readings
from edge_agent.sensors.sysfs import hwmon_named, in_order, read_number, read_text

PMIC_SCALE: Final = 1.145
PMIC_OFFSET_WATTS: Final = 0.588
"""A community fit of the wall figure against the sum of rails; still without USB and HATs."""

VIDEO_FIX: Final = (
    "usermod -aG video AGENT_USER and restart the agent; in a container pass /dev/vcio"
)

_COMMAND_SECONDS: Final = 2.0

# "  3V3_SYS_A current(1)=0.08197812A", and of older firmware "3V3_SYS_A 0.082A" or "...=0.082".
_PMIC_LINE: Final = re.compile(
    r"^\s*(\w+)_([AV])\b[\s:=]*(?:(?:current|volt)\(\d+\))?[\s:=]*(\d+(?:\.\d+)?)\s*[AV]?\s*$",
    re.MULTILINE,
)

_THROTTLE_BITS: Final = (
    (0, "under_voltage"),
    (1, "frequency_capped"),
    (2, "throttled"),
    (3, "soft_temperature_limit"),
)
_SINCE_BOOT: Final = 16

RunCommand = Callable[[str], str]


class CommandError(Exception):
    """vcgencmd is not there or did not work; the text says why."""

    def __init__(self, message: str, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


def vcgencmd(argument: str) -> str:
    """What the firmware answers; takes about ten milliseconds, at most two seconds.

    Raises:
        CommandError: it is not installed, not permitted or does not answer.
    """
    try:
        done = subprocess.run(
            ["vcgencmd", argument],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise CommandError("vcgencmd is not installed", is_missing=True) from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"vcgencmd has not answered within {_COMMAND_SECONDS:g} s") from None
    except OSError as error:
        raise CommandError(f"vcgencmd: {error.strerror}") from error
    text = done.stdout.strip()
    if done.returncode != 0 or not text or "error" in text.lower():
        raise CommandError(f"vcgencmd {argument}: {text or done.stderr.strip() or 'no answer'}")
    return text


def is_raspberry_pi(root: Path) -> bool:
    """Whether the device tree says so."""
    return "Raspberry Pi" in (read_text(root / "proc/device-tree/model") or "")


def has_pmic_sensor(root: Path) -> bool:
    """Whether this is of the Pi 5 family, the only one that can measure current."""
    model = read_text(root / "proc/device-tree/model") or ""
    return any(name in model for name in ("Raspberry Pi 5", "Compute Module 5"))


def rail_watts(text: str) -> dict[str, float]:
    """Watts of each rail that `pmic_read_adc` gives with current and voltage."""
    volts: dict[str, float] = {}
    amperes: dict[str, float] = {}
    for rail, unit, value in _PMIC_LINE.findall(text):
        (amperes if unit == "A" else volts)[rail] = float(value)
    return {rail: volts[rail] * amperes[rail] for rail in amperes if rail in volts}


class PmicSensor:
    """The power controller of a Pi 5: the sum of its rails, scaled to the wall.

    The sum leaves out what USB devices and HATs draw, so its coverage is partial.

    Args:
        root: of the file system that is read; tests give a captured tree.
        scale: the board's power divided by the sum of rails.
        offset_watts: what the board draws beside them.
        run: asks the firmware.
    """

    name = "pmic"
    # Each reading starts a process, which costs about ten milliseconds: 1 % of a core at 1 Hz.
    period_seconds = 1.0

    def __init__(
        self,
        root: Path = Path("/"),
        scale: float = PMIC_SCALE,
        offset_watts: float = PMIC_OFFSET_WATTS,
        run: RunCommand = vcgencmd,
    ) -> None:
        self._root = root
        self._scale = scale
        self._offset_watts = offset_watts
        self._run = run

    def read(self, now: float) -> Readings | NoData:
        """Ask the firmware once."""
        if not has_pmic_sensor(self._root):
            return NoData("no PMIC: only boards of the Pi 5 family measure current")
        try:
            text = self._run("pmic_read_adc")
        except CommandError as error:
            return NoData(
                str(error),
                "apt install raspi-utils" if error.is_missing else VIDEO_FIX,
            )
        rails = rail_watts(text)
        if not rails:
            return NoData(
                "pmic_read_adc gave no rail with current and voltage",
                "update the firmware: rpi-eeprom-update -a, then reboot",
            )
        watts = self._scale * sum(rails.values()) + self._offset_watts
        detail = f"{len(rails)} rails × {self._scale:g} + {self._offset_watts:g} W"
        return Readings(now, PowerReading(Coverage.PARTIAL, 0.15, watts, detail=detail))

    def close(self) -> None:
        """Nothing is held open."""


@dataclass(frozen=True, slots=True)
class Throttling:
    """What limits the board.

    Attributes:
        now: names of what limits it at this moment.
        since_boot: names of what has limited it since it was started.
    """

    now: tuple[str, ...]
    since_boot: tuple[str, ...]


def parse_throttled(text: str) -> Throttling | None:
    """From "throttled=0x50005" or the same number bare; None when it is none."""
    try:
        bits = int(text.strip().rpartition("=")[2], 16)
    except ValueError:
        return None
    return Throttling(
        tuple(name for bit, name in _THROTTLE_BITS if bits >> bit & 1),
        tuple(name for bit, name in _THROTTLE_BITS if bits >> (bit + _SINCE_BOOT) & 1),
    )


def read_throttling(root: Path, run: RunCommand | None = None) -> Throttling | None:
    """What limits this Pi, from sysfs where the kernel has it, else from the firmware.

    Args:
        run: asks the firmware; None asks sysfs only, which then knows of under-voltage alone.

    Returns:
        None when nothing can be known.
    """
    for path in in_order(root / "sys/devices/platform", "soc*/*firmware/get_throttled"):
        found = parse_throttled(read_text(path) or "")
        if found is not None:
            return found
    if run is not None:
        try:
            found = parse_throttled(run("get_throttled"))
        except CommandError:
            found = None
        if found is not None:
            return found
    for folder in hwmon_named(root, "rpi_volt"):
        alarm = read_number(folder / "in0_lcrit_alarm")
        if alarm is not None:
            return Throttling(("under_voltage",) if alarm else (), ())
    return None
