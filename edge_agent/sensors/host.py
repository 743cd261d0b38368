"""Utilisation, memory and temperature of any Linux host."""

import time
import warnings
from typing import Final

import psutil

from edge_agent.sensors.base import Readings

_CPU_SENSORS = ("cpu_thermal", "cpu-thermal", "coretemp", "k10temp", "zenpower", "acpitz")


_TEMPERATURE_SECONDS: Final = 5.0
"""How long a temperature is taken for the present one: reading it costs as much as all the rest."""


class HostSensor:
    """Reads the host; each call measures utilisation since the one before."""

    name = "host"
    period_seconds = 1.0

    def __init__(self) -> None:
        self._load = ProcessorLoad()
        self._utilisation = 0.0
        self._temperature: tuple[float, float | None] | None = None  # when it was read

    def read(self, now: float) -> Readings:
        """One sample; takes about a millisecond."""
        ratio = self._load.ratio()
        if ratio is not None:
            self._utilisation = ratio
        if self._temperature is None or now - self._temperature[0] >= _TEMPERATURE_SECONDS:
            self._temperature = (now, _temperature())
        return Readings(
            now,
            cpu_utilisation_ratio=self._utilisation,
            memory_available_bytes=psutil.virtual_memory().available,
            uptime_seconds=time.clock_gettime(time.CLOCK_BOOTTIME)
            if hasattr(time, "CLOCK_BOOTTIME")
            else time.monotonic(),
            temperature_celsius=self._temperature[1],
        )

    def close(self) -> None:
        """Nothing is held open."""


class ProcessorLoad:
    """How busy all processors of this host were, whoever kept them so.

    psutil's own figure is not used, since it counts for each thread apart.
    """

    def __init__(self) -> None:
        self._busy, self._all = _processor_seconds()

    def ratio(self) -> float | None:
        """Since the call before, or the first one since it was made; 0 to 1.

        None when no time has passed that the kernel has counted, in hundredths of a second.
        """
        busy, everything = _processor_seconds()
        passed = everything - self._all
        if passed <= 0:
            return None
        ratio = (busy - self._busy) / passed
        self._busy, self._all = busy, everything
        return min(max(ratio, 0.0), 1.0)


def _processor_seconds() -> tuple[float, float]:
    """Busy seconds, and all seconds, summed over the processors."""
    times = psutil.cpu_times()
    # Guest time is part of user time already, so a sum over all fields would count it twice.
    everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return everything - times.idle - getattr(times, "iowait", 0.0), everything


def _temperature() -> float | None:
    if not hasattr(psutil, "sensors_temperatures"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # psutil warns about half-present hwmon entries
        try:
            zones = psutil.sensors_temperatures()
        except (OSError, ValueError, RuntimeError, psutil.Error):
            return None  # half-present hwmon entries fail in many ways
    for name in _CPU_SENSORS:
        for entry in zones.get(name, ()):
            if entry.current and entry.current > -200:
                return float(entry.current)
    return None
