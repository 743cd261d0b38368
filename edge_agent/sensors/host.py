"""Utilisation, memory and temperature of any Linux host."""

import time
import warnings

import psutil

from edge_agent.sensors.base import HostSample

_CPU_SENSORS = ("cpu_thermal", "cpu-thermal", "coretemp", "k10temp", "zenpower", "acpitz")


class HostSensor:
    """Reads the host; each call measures utilisation since the one before."""

    def __init__(self) -> None:
        psutil.cpu_percent(interval=None)  # the first reading is a baseline

    def read(self) -> HostSample:
        """One sample; takes about a millisecond."""
        return HostSample(
            cpu_utilisation_ratio=min(psutil.cpu_percent(interval=None) / 100.0, 1.0),
            memory_available_bytes=psutil.virtual_memory().available,
            uptime_seconds=time.clock_gettime(time.CLOCK_BOOTTIME)
            if hasattr(time, "CLOCK_BOOTTIME")
            else time.monotonic(),
            temperature_celsius=_temperature(),
            is_throttled=None,
        )


class ProcessorLoad:
    """How busy all processors of this host were since it was made, whoever kept them so."""

    def __init__(self) -> None:
        self._busy, self._all = _processor_seconds()

    def ratio(self) -> float | None:
        """0 to 1; None when no time has passed that the kernel has counted."""
        busy, everything = _processor_seconds()
        passed = everything - self._all
        return min(max((busy - self._busy) / passed, 0.0), 1.0) if passed > 0 else None


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
            return None  # half-present hwmon entries fail in many ways (case D7)
    for name in _CPU_SENSORS:
        for entry in zones.get(name, ()):
            if entry.current and entry.current > -200:
                return float(entry.current)
    return None
