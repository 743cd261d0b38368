"""Power, load and throttling of NVIDIA Jetson boards."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edge_agent.sensors.base import Coverage, NoData, PowerReading, Readings
from edge_agent.sensors.sysfs import hwmon_named, in_order, read_number, read_text

_INPUT_RAILS: Final = ("VDD_IN", "POM_5V_IN", "VIN")
"""Rails that carry everything the board draws: Nano, NX, Orin Nano and NX, TX2, Thor."""

_SUMMED_RAILS: Final = (
    # AGX Orin. VDDQ_VDD2_1V8AO hangs behind VIN_SYS_5V0, so it is not added.
    frozenset({"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}),
    # AGX Xavier.
    frozenset({"GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"}),
)
"""Boards without an input rail: what to add up there."""

_LEAST_FIGURE: Final = -1000
"""An unloaded shunt may read a little below 0; less than this is no reading."""

_MAX_BOARD_WATTS: Final = 500.0

_GPU_LOADS: Final = (
    # They moved between releases: JetPack 4, 5, 6 and 7.
    "sys/devices/gpu.0/load",
    "sys/devices/platform/gpu.0/load",
    "sys/devices/platform/17000000.gpu/load",
    "sys/devices/platform/bus@0/17000000.gpu/load",
    "sys/class/devfreq/17000000.ga10b/device/load",
    "sys/class/devfreq/17000000.gv11b/device/load",
    "sys/class/devfreq/57000000.gpu/device/load",
)

JTOP_FIX: Final = (
    "usermod -aG jtop AGENT_USER and restart the agent; in a container mount /run/jtop.sock, add "
    "the host's jtop group and install the same jetson-stats version as on the host"
)


@dataclass(frozen=True, slots=True)
class Rail:
    """One supply rail."""

    label: str
    power_watts: float


@dataclass(frozen=True, slots=True)
class RailFiles:
    """Where one rail's figures are; their product times `scale` is watts."""

    label: str
    paths: tuple[Path, ...]
    scale: float

    def read(self) -> Rail | None:
        """The rail now; None when it cannot be read."""
        watts = self.scale
        for path in self.paths:
            number = read_number(path)
            if number is None or number < _LEAST_FIGURE:
                return None
            watts *= max(0, number)
        return Rail(self.label, watts)


def find_rails(root: Path) -> list[RailFiles]:
    """All rails with a name, in hwmon or, on JetPack 4, in iio; empty when there are none.

    Channels that are not connected and the chip's own sum of channels are left out.
    """
    found = [rail for folder in hwmon_named(root, "ina3221") for rail in _ina3221_rails(folder)]
    for folder in hwmon_named(root, "ina238"):  # the carrier board's input on Thor, microwatts
        label = read_text(folder / "in1_label") or "VIN"
        found.append(RailFiles(label, (folder / "power1_input",), 1e-6))
    return found or list(_iio_rails(root))


def _ina3221_rails(folder: Path) -> Iterator[RailFiles]:
    for channel in (1, 2, 3):  # 4 to 6 are shunts, 7 is their sum
        label = read_text(folder / f"in{channel}_label")
        if label and _is_rail(label):
            millivolts = folder / f"in{channel}_input"
            milliamperes = folder / f"curr{channel}_input"
            yield RailFiles(label, (millivolts, milliamperes), 1e-6)


def _iio_rails(root: Path) -> Iterator[RailFiles]:
    for device in in_order(root / "sys/bus/i2c/drivers/ina3221x", "*/iio:device*"):
        for channel in (0, 1, 2):
            label = read_text(device / f"rail_name_{channel}")
            if label and _is_rail(label):
                yield RailFiles(label, (device / f"in_power{channel}_input",), 1e-3)


def _is_rail(label: str) -> bool:
    return label != "NC" and "sum of shunt" not in label


def board_power(rails: list[Rail]) -> tuple[float, Coverage, str]:
    """What the board draws: its input rail, else the sum that its rail table says, else of all.

    Returns:
        watts, what they cover, and which rails they are.
    """
    by_label = {rail.label: rail.power_watts for rail in rails}
    for label in _INPUT_RAILS:
        if label in by_label:
            return by_label[label], Coverage.BOARD, label
    for table in _SUMMED_RAILS:
        if table <= by_label.keys():
            by_label = {label: watts for label, watts in by_label.items() if label in table}
            break
    return sum(by_label.values()), Coverage.PARTIAL, " + ".join(sorted(by_label))


class JetsonSensor:
    """The board's INA3221 power monitors, read from sysfs.

    Args:
        root: of the file system that is read; tests give a captured tree.
    """

    name = "ina3221"
    period_seconds = 0.1

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._files: list[RailFiles] = []

    def read(self, now: float) -> Readings | NoData:
        """Read the rails that make up the board's power, each with about a millisecond of I2C."""
        is_new = not self._files
        if is_new:
            self._files = find_rails(self._root)
        rails = [rail for files in self._files if (rail := files.read()) is not None]
        if not rails or (not is_new and len(rails) < len(self._files)):
            self._files = []  # names are looked for again with the next reading
            return self._absent()
        watts, coverage, detail = board_power(rails)
        if is_new:  # ten times a second only what counts
            wanted = set(detail.split(" + "))
            self._files = [files for files in self._files if files.label in wanted]
        return _readings(watts, coverage, detail, now)

    def close(self) -> None:
        """Nothing is held open."""

    def _absent(self) -> NoData:
        if not is_jetson(self._root):
            return NoData("no INA3221: this is no Jetson")
        return NoData(
            "this Jetson's INA3221 rails cannot be read",
            "in a container mount the host's /sys read-only; else: ls /sys/class/hwmon/*/name",
        )


def is_jetson(root: Path) -> bool:
    """Whether the device tree says so."""
    return "nvidia,tegra" in (read_text(root / "proc/device-tree/compatible") or "")


def gpu_load_ratio(root: Path = Path("/")) -> float | None:
    """How busy the integrated GPU is, 0 to 1; None when the kernel does not say."""
    for path in _GPU_LOADS:
        per_mille = read_number(root / path)
        if per_mille is not None and 0 <= per_mille <= 1000:
            return per_mille / 1000.0
    return None


class JtopSensor:
    """The jetson-stats service, which an operator may have instead of readable rails.

    Connecting may hang and a dead service keeps its last figures without a word, so a thread of
    its own talks to it, and figures whose timestamp stands still are not taken.

    Args:
        connect: makes the client, a context manager with `ok()`, `power` and `stats`; raises
            ImportError where jetson-stats is not installed.
        stale_seconds: figures that have not changed for this long are old.
    """

    name = "jtop"
    period_seconds = 1.0

    def __init__(self, connect: Callable[[], Any], stale_seconds: float = 3.0) -> None:
        self._connect = connect
        self._stale_seconds = stale_seconds
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._figures: tuple[object, Any] | None = None  # its timestamp and its power
        self._problem: NoData | None = None
        self._is_closed = False
        self._seen: tuple[object, float] | None = None  # a timestamp and when it was new

    def read(self, now: float) -> Readings | NoData:
        """Look at what the thread has; never waits for the service."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._listen, name="jtop", daemon=True)
            self._seen = (None, now)
            self._thread.start()
        with self._lock:
            figures, problem = self._figures, self._problem
        if problem is not None:
            self._thread = None  # the next read tries again
            with self._lock:
                self._problem = self._figures = None
            return problem
        stamp = figures[0] if figures else None
        if self._seen is None or self._seen[0] != stamp:
            self._seen = (stamp, now)
        if now - self._seen[1] > self._stale_seconds:
            return NoData(
                "the jtop service has stopped answering", "systemctl restart jtop.service"
            )
        if figures is None:
            return NoData("the jtop service has not answered yet", is_pending=True)
        return _jtop_readings(figures[1], now)

    def close(self) -> None:
        """Let the thread end with its next answer; it holds nothing up meanwhile."""
        self._is_closed = True

    def _listen(self) -> None:
        problem: NoData
        try:
            with self._connect() as client:
                while client.ok():
                    stats = dict(client.stats)
                    stamp = (str(stats.get("uptime")), str(stats.get("time")))
                    with self._lock:
                        self._figures = (stamp, client.power)
                    if self._is_closed:
                        return
            problem = NoData("the jtop service has closed the connection")
        except ImportError:
            problem = NoData("jetson-stats is not installed")
        except Exception as error:  # its own exceptions differ between versions
            problem = NoData(f"jtop: {type(error).__name__}: {error}", JTOP_FIX)
        with self._lock:
            self._problem = problem


def _jtop_readings(power: Any, now: float) -> Readings | NoData:
    try:
        rails = [
            Rail(str(name), float(rail["power"]) / 1e3)
            for name, rail in dict(power.get("rail", {})).items()
            if rail.get("online", True) and "power" in rail
        ]
        total = dict(power.get("tot", {}))
        # jtop takes the input rail out of its list and calls it the total; without one, the sum
        # is made here by the rail table, since jtop's own has been wrong.
        summed = sum(rail.power_watts for rail in rails)
        watts = float(total["power"]) / 1e3 if "power" in total else summed
        if abs(watts - summed) > 0.01 * abs(summed):
            rails.append(Rail(_INPUT_RAILS[0], watts))
    except (AttributeError, KeyError, TypeError, ValueError):
        return NoData("jtop gave power figures of an unknown form", JTOP_FIX)
    if not rails:
        return NoData("jtop knows no power rail on this board")
    watts, coverage, detail = board_power(rails)
    return _readings(watts, coverage, f"jtop: {detail}", now)


def _readings(watts: float, coverage: Coverage, detail: str, now: float) -> Readings | NoData:
    if not 0 < watts <= _MAX_BOARD_WATTS:  # a board that runs draws something
        return NoData(f"{detail}: {watts:g} W cannot be")
    error = 0.05 if coverage is Coverage.BOARD else 0.15
    return Readings(now, PowerReading(coverage, error, watts, detail=detail))
