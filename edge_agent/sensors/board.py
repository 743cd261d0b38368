"""How the board is, by its own sensors: temperature, throttling, GPU load, power mode."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_agent.sensors.base import Readings
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


_FIND_SECONDS: Final = 30.0
"""How often files are looked for, which costs more than reading them; devices seldom change."""


@dataclass(frozen=True, slots=True)
class _Files:
    found_at: float
    zones: list[Path]
    counters: list[Path]
    alarms: list[Path]


class BoardSensor:
    """Reads the board; counters of throttling events are compared with the call before.

    Args:
        root: of the file system that is read; tests give a captured tree.
        run: asks a Raspberry Pi's firmware.
    """

    name = "board"
    period_seconds = 1.0

    def __init__(self, root: Path = Path("/"), run: RunCommand = vcgencmd) -> None:
        self._root = root
        self._run = run
        self._is_pi = is_raspberry_pi(root)
        self._is_jetson = is_jetson(root)
        self._files: _Files | None = None
        self._counts: dict[Path, int] = {}
        self._answer: tuple[float, str] | None = None  # when the firmware was asked, what it said

    def read(self, now: float) -> Readings:
        """One look. May start a process on a Pi, so it is not for the event loop."""
        files = self._files
        if files is None or not 0 <= now - files.found_at < _FIND_SECONDS:
            files = self._files = self._find(now)
        limits = self._pi_limits(now) if self._is_pi else self._counted_limits(files)
        return Readings(
            now,
            temperature_celsius=_temperature(files.zones),
            is_throttled=None if limits is None else bool(limits),
            limits=limits or (),
            gpu_utilisation_ratio=gpu_load_ratio(self._root) if self._is_jetson else None,
            power_mode=read_power_mode(self._root),
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _find(self, now: float) -> _Files:
        zones = _processor_zones(self._root)
        if self._is_jetson:
            # Over-current events of the SoC, and the supply's alarms.
            return _Files(
                now,
                zones,
                [
                    path
                    for folder in hwmon_named(self._root, "soctherm_oc")
                    for path in in_order(folder, "oc*_event_cnt")
                ],
                [
                    path
                    for folder in hwmon_named(self._root, "ina3221")
                    for path in in_order(folder, "curr[123]_crit_alarm")
                ],
            )
        cpu = self._root / "sys/devices/system/cpu/cpu0/thermal_throttle"
        return _Files(now, zones, in_order(cpu, "*_throttle_count"), [])

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

    def _counted_limits(self, files: _Files) -> tuple[str, ...] | None:
        is_known = is_limited = False
        for path in files.counters:
            count = read_number(path)
            if count is None:
                continue
            is_known = True
            is_limited |= count > self._counts.get(path, count)
            self._counts[path] = count
        for path in files.alarms:
            alarm = read_number(path)
            if alarm is not None:
                is_known = True
                is_limited |= alarm > 0
        if not is_known:
            return None
        name = "over_current" if self._is_jetson else "thermal"
        return (name,) if is_limited else ()


def read_temperature(root: Path) -> float | None:
    """The processor's zone in degrees; None when there is none or it is offline."""
    return _temperature(_processor_zones(root))


def _processor_zones(root: Path) -> list[Path]:
    """Where the processor's temperatures are, the likeliest first."""
    zones = in_order(root / "sys/class/thermal", "thermal_zone*")
    return [zone / "temp" for zone in zones if read_text(zone / "type") in _CPU_ZONES]


def _temperature(zones: list[Path]) -> float | None:
    for zone in zones:
        millidegrees = read_number(zone)
        if millidegrees is not None and millidegrees > -200_000:  # -256 °C means offline
            return millidegrees / 1000.0
    return None
