"""Processor energy of x86 machines from the powercap tree (Intel and AMD)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_agent.sensors.base import Coverage, NoData, PowerReading, Readings
from edge_agent.sensors.energy import WrappingCounter
from edge_agent.sensors.sysfs import in_order, read_number, read_text

_MAX_PACKAGE_WATTS: Final = 2000.0
"""No package draws this much; a faster rise of its counter is a reset."""

RAPL_FIX: Final = (
    "let the agent's group read it, as root: groupadd -f rapl; "
    "printf 'z /sys/class/powercap/*/energy_uj 0440 root rapl\\n' > /etc/tmpfiles.d/rapl.conf; "
    "systemd-tmpfiles --create; usermod -aG rapl AGENT_USER; then restart the agent. "
    "Not for all users: the counter tells secrets to a neighbour (CVE-2020-8694)"
)


@dataclass(slots=True)
class _Domain:
    name: str
    path: Path
    counter: WrappingCounter


class RaplSensor:
    """The packages' counters, added up.

    A package contains its cores and its memory controller, so sub-domains are not added; psys
    contains the packages and is only told of in `detail`.

    Args:
        root: of the file system that is read; tests give a captured tree.
        period_seconds: a counter misses nothing, so this is only how fine the segments are.
    """

    name = "rapl"

    def __init__(self, root: Path = Path("/"), period_seconds: float = 0.1) -> None:
        self.period_seconds = period_seconds
        self._root = root
        self._domains: list[_Domain] | None = None
        self._has_psys = False
        self._joules = 0.0
        self._last_at: float | None = None
        self._problem = NoData("no RAPL: this machine has no powercap tree (usual in a VM)")

    @property
    def dropped_readings(self) -> int:
        """Differences that no package could have used."""
        return sum(domain.counter.dropped for domain in self._domains or ())

    def read(self, now: float) -> Readings | NoData:
        """Read every package once."""
        if self._domains is None:
            self._domains = self._find()
        if not self._domains:
            self._domains = None  # a driver may be loaded later
            return self._problem
        rises: list[int] = []
        for domain in self._domains:
            try:
                raw = int(domain.path.read_text())
            except PermissionError:
                return NoData(f"{domain.path}: permission denied (root only)", RAPL_FIX)
            except (OSError, ValueError):
                self._domains = None
                return NoData(f"{domain.path}: cannot be read")
            rise = domain.counter.advance(raw, now)
            if rise is not None:
                rises.append(rise)
        if len(rises) < len(self._domains):
            is_first, self._last_at = self._last_at is None, now
            if is_first:
                return self._reading(now, None)
            return NoData("a RAPL counter jumped; the interval is left out")
        joules = sum(rises) / 1e6
        seconds = now - (self._last_at or now)
        self._last_at = now
        self._joules += joules
        return self._reading(now, joules / seconds if seconds > 0 else None)

    def close(self) -> None:
        """Nothing is held open."""

    def _reading(self, now: float, watts: float | None) -> Readings:
        names = " + ".join(domain.name for domain in self._domains or ())
        power = PowerReading(
            Coverage.PACKAGE,
            relative_error=0.1,
            power_watts=watts,
            energy_joules=self._joules,
            detail=names + ("; psys, which contains it, is not added" if self._has_psys else ""),
        )
        return Readings(now, power)

    def _find(self) -> list[_Domain]:
        self._joules, self._last_at, self._has_psys = 0.0, None, False
        domains: list[_Domain] = []
        # Top-level domains only: "intel-rapl:0", not "intel-rapl:0:0". intel-rapl-mmio repeats it.
        for folder in in_order(self._root / "sys/class/powercap", "intel-rapl:*"):
            if folder.name.count(":") != 1:
                continue
            name = read_text(folder / "name")
            limit = read_number(folder / "max_energy_range_uj")
            if name is None or not limit or limit <= 0:
                continue  # a container shows links that lead nowhere
            if name.startswith("psys"):
                self._has_psys = True
            elif name.startswith("package"):
                counter = WrappingCounter(limit + 1, _MAX_PACKAGE_WATTS * 1e6)
                domains.append(_Domain(name, folder / "energy_uj", counter))
        return domains
