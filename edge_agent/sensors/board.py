"""Temperature and throttling as the board's own sensors tell them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_agent.sensors.jetson import gpu_load_ratio, is_jetson
from edge_agent.sensors.power_mode import read_power_mode
from edge_agent.sensors.raspberry_pi import (
    CommandError,
    RunCommand,
    is_raspberry_pi,
    read_throttling,
    vcgencmd,
)
from edge_agent.sensors.sysfs import hwmon_named, in_order, read_number, read_text

_CPU_ZONES: Final = ("cpu-thermal", "cpu_thermal", "CPU-therm", "x86_pkg_temp", "soc-thermal")

_FIRMWARE_SECONDS: Final = 5.0
"""How often the firmware is asked where sysfs does not tell, since that starts a process."""


@dataclass(frozen=True, slots=True)
class BoardState:
    """What the board says.

    Attributes:
        temperature_celsius: None when it has no zone for its processor.
        is_throttled: None when the board cannot tell.
        limits: names of what holds it back now, such as "under_voltage".
        gpu_utilisation_ratio: of a GPU on the board, 0 to 1; None when there is none.
        power_mode: see `read_power_mode`.
    """

    temperature_celsius: float | None = None
    is_throttled: bool | None = None
    limits: tuple[str, ...] = ()
    gpu_utilisation_ratio: float | None = None
    power_mode: str = ""


class BoardSensor:
    """Reads the board; counters of throttling events are compared with the call before.

    Args:
        root: of the file system that is read; tests give a captured tree.
        run: asks a Raspberry Pi's firmware.
    """

    def __init__(self, root: Path = Path("/"), run: RunCommand = vcgencmd) -> None:
        self._root = root
        self._run = run
        self._is_pi = is_raspberry_pi(root)
        self._is_jetson = is_jetson(root)
        self._counts: dict[Path, int] = {}
        self._answer: tuple[float, str] | None = None  # when the firmware was asked, what it said

    def read(self, now: float) -> BoardState:
        """One look; `now` is monotonic seconds.

        May start a process on a Pi, so it is not for the event loop.
        """
        limits = self._pi_limits(now) if self._is_pi else self._counted_limits()
        return BoardState(
            temperature_celsius=read_temperature(self._root),
            is_throttled=None if limits is None else bool(limits),
            limits=limits or (),
            gpu_utilisation_ratio=gpu_load_ratio(self._root) if self._is_jetson else None,
            power_mode=read_power_mode(self._root),
        )

    def _pi_limits(self, now: float) -> tuple[str, ...] | None:
        found = read_throttling(self._root, lambda argument: self._ask_firmware(argument, now))
        return None if found is None else found.now

    def _ask_firmware(self, argument: str, now: float) -> str:
        if self._answer is None or now - self._answer[0] >= _FIRMWARE_SECONDS:
            try:
                self._answer = (now, self._run(argument))
            except CommandError:
                self._answer = (now, "")
        return self._answer[1]

    def _counted_limits(self) -> tuple[str, ...] | None:
        if self._is_jetson:
            # Over-current events of the SoC, and the supply's alarms.
            counters = [
                path
                for folder in hwmon_named(self._root, "soctherm_oc")
                for path in in_order(folder, "oc*_event_cnt")
            ]
            alarms = [
                path
                for folder in hwmon_named(self._root, "ina3221")
                for path in in_order(folder, "curr[123]_crit_alarm")
            ]
            name = "over_current"
        else:
            cpu = self._root / "sys/devices/system/cpu/cpu0/thermal_throttle"
            counters, alarms = in_order(cpu, "*_throttle_count"), []
            name = "thermal"
        is_known = is_limited = False
        for path in counters:
            count = read_number(path)
            if count is None:
                continue
            is_known = True
            is_limited |= count > self._counts.get(path, count)
            self._counts[path] = count
        for path in alarms:
            alarm = read_number(path)
            if alarm is not None:
                is_known = True
                is_limited |= alarm > 0
        if not is_known:
            return None
        return (name,) if is_limited else ()


def read_temperature(root: Path) -> float | None:
    """The processor's zone in degrees; None when there is none or it is offline."""
    for zone in in_order(root / "sys/class/thermal", "thermal_zone*"):
        if read_text(zone / "type") in _CPU_ZONES:
            millidegrees = read_number(zone / "temp")
            if millidegrees is not None and millidegrees > -200_000:  # -256 °C means offline
                return millidegrees / 1000.0
    return None
