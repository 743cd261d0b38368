"""What sensors say; a value that is not known is None or `NoData` with its reason, never 0."""

import enum
from dataclasses import dataclass
from typing import Final, Protocol

ESTIMATE: Final = "estimate"
"""The source of watts and joules that no sensor measured. Every other source is a sensor's name."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """One look at the host.

    Attributes:
        cpu_utilisation_ratio: since the last look, 0 to 1.
        temperature_celsius: of the processor; None when the board has no such sensor.
        is_throttled: None when the board cannot tell.
    """

    cpu_utilisation_ratio: float
    memory_available_bytes: int
    uptime_seconds: float
    temperature_celsius: float | None
    is_throttled: bool | None


class Coverage(enum.Enum):
    """What part of the machine a figure stands for.

    BOARD is everything behind the power socket of the board; PACKAGE the processor with what
    shares its package; GPU the cards alone; PARTIAL a sum of rails that leaves something out.
    """

    BOARD = "board"
    PACKAGE = "package"
    GPU = "gpu"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of a power sensor.

    Attributes:
        source: the sensor's name; never ESTIMATE.
        relative_error: what is known beforehand of the figure's error, 0.05 meaning 5 %.
        measured_at: monotonic seconds.
        power_watts: None for a counter's first reading, which is only a baseline.
        energy_joules: a counter that never falls, from the sensor's first reading on; None where
            the hardware has none, so that power must be integrated.
        detail: which rails, domains or cards, for people.
    """

    source: str
    coverage: Coverage
    relative_error: float
    measured_at: float
    power_watts: float | None
    energy_joules: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NoData:
    """Why a sensor says nothing.

    Attributes:
        reason: in plain words.
        fix: what an operator can do about it; empty when the hardware is simply not there.
    """

    reason: str
    fix: str = ""


class Sensor(Protocol):
    """One source of power figures.

    Keeps: `read` never raises for what a board, a driver or a service does, returns within
    about `period_seconds` and may be called from any one thread. A source that exists in name
    only says `NoData` (cases D9, D16).
    """

    @property
    def name(self) -> str:
        """What it is, for logs and the doctor."""
        ...

    @property
    def period_seconds(self) -> float:
        """How often it is worth reading."""
        ...

    def read(self, now: float) -> Reading | NoData:
        """Read the hardware; `now` is monotonic seconds and becomes `measured_at`."""
        ...

    def close(self) -> None:
        """Let go of what it holds; a second call does nothing."""
        ...
