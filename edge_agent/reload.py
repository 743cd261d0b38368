"""What of new settings a running agent can take, and what it needs a restart for (pure)."""

from dataclasses import dataclass, fields, replace
from typing import Final

from edge_agent.config import Settings

_LIVE: Final = ("log_level", "drain_seconds", "memory", "models")
_LIVE_POWER: Final = ("idle_watts", "max_watts")


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """What becomes of new settings.

    Attributes:
        settings: what holds from now on: the new ones where they can be taken, else the old ones.
        applied: names of the settings that change.
        needs_restart: names of those that would change and cannot.
    """

    settings: Settings
    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]


def plan_reload(old: Settings, new: Settings) -> ReloadPlan:
    """Compare settings.

    Args:
        old: those in force.
        new: those just read, known to be valid.
    """
    power = replace(old.power, **{name: getattr(new.power, name) for name in _LIVE_POWER})
    taken = replace(old, power=power, **{name: getattr(new, name) for name in _LIVE})
    return ReloadPlan(taken, _differences(old, taken), _differences(taken, new))


def _differences(one: Settings, other: Settings) -> tuple[str, ...]:
    found: list[str] = []
    for entry in fields(one):
        before, after = getattr(one, entry.name), getattr(other, entry.name)
        if before == after:
            continue
        if entry.name in ("controller", "power", "link"):
            found += [
                f"{entry.name}.{part.name}"
                for part in fields(before)
                if getattr(before, part.name) != getattr(after, part.name)
            ]
        else:
            found.append(entry.name)
    return tuple(found)
