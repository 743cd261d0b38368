"""The contract of a sensor; what is not known is None or `NoData` with its reason, never 0."""

import enum
from dataclasses import dataclass
from typing import Final, Protocol

ESTIMATE: Final = "estimate"
"""The source of watts and joules that no sensor measured. Every other source is a sensor's name."""


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
class PowerReading:
    """What a sensor says of power.

    Attributes:
        relative_error: what is known beforehand of the figure's error, 0.05 meaning 5 %.
        power_watts: None for a counter's first reading, which is only a baseline.
        energy_joules: a counter that never falls, from the sensor's first reading on; None where
            the hardware has none, so that power must be integrated.
        detail: which rails, domains or cards, for people.
    """

    coverage: Coverage
    relative_error: float
    power_watts: float | None
    energy_joules: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Readings:
    """What one sensor says at one moment; or, merged, all of a node's.

    Attributes:
        measured_at: monotonic seconds.
        power: None for a sensor that measures none.
        cpu_utilisation_ratio: since the reading before, 0 to 1.
        temperature_celsius: of the processor; None when the board has no such sensor.
        is_throttled: None when the board cannot tell.
        limits: names of what holds the board back now, such as "under_voltage".
        gpu_utilisation_ratio: 0 to 1; None without a graphics processor, or when it cannot tell.
        power_mode: such as nvpmodel's "15W"; empty when there is none.
    """

    measured_at: float
    power: PowerReading | None = None
    cpu_utilisation_ratio: float | None = None
    memory_available_bytes: int | None = None
    uptime_seconds: float | None = None
    temperature_celsius: float | None = None
    is_throttled: bool | None = None
    limits: tuple[str, ...] = ()
    gpu_utilisation_ratio: float | None = None
    power_mode: str = ""


@dataclass(frozen=True, slots=True)
class NoData:
    """Why a sensor says nothing.

    Attributes:
        reason: in plain words.
        fix: what an operator can do about it; empty when the hardware is simply not there.
        is_pending: True while a service that was asked has not answered yet.
    """

    reason: str
    fix: str = ""
    is_pending: bool = False


@dataclass(frozen=True, slots=True)
class SensorStatus:
    """How a sensor did with its last reading.

    Attributes:
        is_used: whether the node's figures come from it now.
        read_seconds: how long the reading took.
        reason, fix: why it failed, and what to do about it; empty for one that works.
    """

    name: str
    is_working: bool
    is_used: bool
    read_seconds: float
    reason: str = ""
    fix: str = ""


class Sensor(Protocol):
    """One source of readings.

    Keeps: `read` never raises for what a board, a driver or a service does, returns within
    about `period_seconds` and may be called from any thread, one call at a time. A source that
    exists in name only says `NoData`.
    """

    @property
    def name(self) -> str:
        """What it is, for logs, status and wire; it is the source of what it measured."""
        ...

    @property
    def period_seconds(self) -> float:
        """How often it is worth reading."""
        ...

    def read(self, now: float) -> Readings | NoData:
        """Read the hardware; `now` is monotonic seconds and becomes `measured_at`."""
        ...

    def close(self) -> None:
        """Let go of what it holds; a second call does nothing."""
        ...
