"""Which models share a node's memory, and who goes when another one comes (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from edge_agent.config import MemorySettings


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that has memory, or has been promised it.

    Attributes:
        reserved_bytes: what it is counted with: its estimate or what it really takes, whichever
            is more.
        is_busy: has requests, or is being loaded or measured.
        last_used_at: monotonic seconds.
    """

    name: str
    reserved_bytes: int
    is_pinned: bool
    is_busy: bool
    last_used_at: float


@dataclass(frozen=True, slots=True)
class Room:
    """The model fits once these have been unloaded, in this order."""

    evict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The model does not fit; `message` says why, with the numbers."""

    message: str


def budget_of(memory: MemorySettings, available_bytes: int, total_bytes: int) -> int:
    """What all loaded models may take together.

    Args:
        available_bytes: to new processes, when nothing was loaded yet.
        total_bytes: of the machine.
    """
    if memory.budget_bytes:
        return memory.budget_bytes
    if memory.budget_ratio:
        return int(memory.budget_ratio * total_bytes)
    return max(0, available_bytes - memory.reserve_bytes)


def make_room(
    name: str,
    needed_bytes: int,
    budget_bytes: int,
    residents: Sequence[Resident],
    idle_since: float | None,
) -> Room | NoRoom:
    """Find room for one more model, at the cost of those that were used longest ago.

    Never takes the room of a pinned or busy one, and none at all when that would not be enough.

    Args:
        name: of the model that comes.
        needed_bytes: what it will take.
        budget_bytes: what all of them may take together.
        residents: those that are there, without the one that comes.
        idle_since: only who was last used at or before this moment may have to go, monotonic
            seconds; None takes nobody's room.
    """
    used = sum(resident.reserved_bytes for resident in residents)
    evict: list[str] = []
    if idle_since is not None and needed_bytes <= budget_bytes:
        for resident in sorted(residents, key=lambda found: found.last_used_at):
            if used + needed_bytes <= budget_bytes:
                break
            if resident.is_pinned or resident.is_busy or resident.last_used_at > idle_since:
                continue
            evict.append(resident.name)
            used -= resident.reserved_bytes
    if used + needed_bytes <= budget_bytes:
        return Room(tuple(evict))
    there = ", ".join(_described(resident, idle_since) for resident in residents)
    return NoRoom(
        f"{name} needs about {_mebibytes(needed_bytes)} of memory and the budget is "
        f"{_mebibytes(budget_bytes)}"
        + (f", of which others hold: {there}" if there else "")
        + "; unload one, give fewer slots or a shorter context, or raise [memory] budget_bytes"
    )


def _described(resident: Resident, idle_since: float | None) -> str:
    if resident.is_pinned:
        why = ", pinned"
    elif resident.is_busy:
        why = ", busy"
    elif idle_since is not None and resident.last_used_at > idle_since:
        why = ", just used"
    else:
        why = ""
    return f"{resident.name} ({_mebibytes(resident.reserved_bytes)}{why})"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
