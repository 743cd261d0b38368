"""Power of boards without a sensor: idle + utilisation * (max - idle), and said to be an estimate.

The figures are round numbers for the board with its usual supply, from public measurements; an
operator with a meter sets their own.
"""

from dataclasses import dataclass
from typing import Final

from edge_agent.sensors.base import Coverage

_BOARD_WATTS: Final = (
    # What the board calls itself contains this -> idle and fully busy watts.
    ("Raspberry Pi 5", 3.0, 12.0),
    ("Raspberry Pi 400", 2.8, 6.5),
    ("Raspberry Pi 4", 2.7, 6.5),
    ("Raspberry Pi 3", 1.9, 5.0),
    ("Jetson AGX Orin", 9.0, 50.0),
    ("Jetson Orin NX", 5.0, 20.0),
    ("Orin Nano", 5.0, 15.0),
    ("Jetson Nano", 2.0, 10.0),
)

_CORE_IDLE_WATTS: Final = 1.5
_CORE_MAX_WATTS: Final = 8.0
"""A virtual core's share of a server: about its part of the package's rated power."""

# How far off each kind may be, known beforehand of no machine in particular: a straight line
# between two measured points, a board of this name with unknown peripherals, a guess by cores.
_METERED_ERROR: Final = 0.2
_BOARD_ERROR: Final = 0.4
_CORES_ERROR: Final = 0.75


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Linear in utilisation.

    Attributes:
        idle_watts, max_watts: when idle and when fully busy.
        relative_error: what is known beforehand of the error, 0.4 meaning 40 %.
        coverage: what part of the machine the figures stand for.
    """

    idle_watts: float
    max_watts: float
    relative_error: float = _METERED_ERROR
    coverage: Coverage = Coverage.BOARD

    def watts(self, utilisation_ratio: float) -> float:
        """Power at this utilisation, 0 to 1."""
        return self.idle_watts + utilisation_ratio * (self.max_watts - self.idle_watts)


def power_model(
    hardware: str, cpu_cores: int, idle_watts: float | None, max_watts: float | None
) -> PowerModel:
    """The operator's figures, else the board's, else the cores' share of a server."""
    if idle_watts is not None and max_watts is not None:
        return PowerModel(idle_watts, max_watts)
    for name, idle, busy in _BOARD_WATTS:
        if name in hardware:
            return PowerModel(idle, busy, _BOARD_ERROR)
    idle, busy = _CORE_IDLE_WATTS * cpu_cores, _CORE_MAX_WATTS * cpu_cores
    return PowerModel(idle, busy, _CORES_ERROR, Coverage.PARTIAL)
