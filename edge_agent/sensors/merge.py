"""From what several sensors say to what is true of the node (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from edge_agent.sensors.base import Coverage, PowerReading, Readings


@dataclass(frozen=True, slots=True)
class SourcedPower:
    """The node's power at one moment, and which sensor measured it."""

    source: str
    measured_at: float
    power: PowerReading


def merged(said: Iterable[Readings]) -> Readings | None:
    """For each quantity, what the first sensor says that knows it; None when none says anything.

    The merged `measured_at` is the latest one.
    """
    whole: Readings | None = None
    for readings in said:
        if whole is None:
            whole = readings
            continue
        new = {
            name: value
            for name in _QUANTITIES
            if _is_unknown(getattr(whole, name))
            and not _is_unknown(value := getattr(readings, name))
        }
        latest = max(whole.measured_at, readings.measured_at)
        whole = replace(whole, measured_at=latest, **new)
    return whole


_QUANTITIES = tuple(field.name for field in fields(Readings) if field.name != "measured_at")


def _is_unknown(value: object) -> bool:
    return value is None or value == "" or value == ()


def chosen_sources(said: Mapping[str, PowerReading]) -> list[str]:
    """Which sensors make up the node's power.

    Args:
        said: by name, best first.

    Returns:
        the first that stands for the whole board or is a sum of its rails; else all, since they
        stand for parts of the machine, such as a processor's package and the cards beside it.
    """
    for name, power in said.items():
        if is_whole(power):
            return [name]
    return list(said)


def is_whole(power: PowerReading) -> bool:
    """Whether nothing may be added to it."""
    return power.coverage in (Coverage.BOARD, Coverage.PARTIAL)


def added(said: Sequence[tuple[str, Readings]]) -> SourcedPower | None:
    """One figure for parts of a machine that do not overlap; cards give it their name.

    Args:
        said: what each chosen sensor says, by name; None is given back where one says no power.
    """
    powers = [(name, readings.power) for name, readings in said if readings.power is not None]
    if not powers or len(powers) < len(said):
        return None
    measured_at = max(readings.measured_at for _, readings in said)
    if len(powers) == 1:
        return SourcedPower(powers[0][0], measured_at, powers[0][1])
    cards = (name for name, power in powers if power.coverage is Coverage.GPU)
    watts = [power.power_watts for _, power in powers]
    joules = [power.energy_joules for _, power in powers]
    known_watts = [value for value in watts if value is not None]
    known_joules = [value for value in joules if value is not None]
    return SourcedPower(
        next(cards, powers[0][0]),
        measured_at,
        PowerReading(
            coverage=Coverage.PARTIAL,
            relative_error=max(power.relative_error for _, power in powers),
            power_watts=sum(known_watts) if len(known_watts) == len(watts) else None,
            energy_joules=sum(known_joules) if len(known_joules) == len(joules) else None,
            detail=" + ".join(f"{name} {power.detail}" for name, power in powers),
        ),
    )
