"""What sensors say; a value that is not known is None, never 0."""

from dataclasses import dataclass


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
