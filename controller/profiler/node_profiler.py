"""Whether a node can be used now, judged by when something arrived and by nothing else.

Pure. A node's own clock is never asked. Stale means unknown, and unknown takes nothing: a node that
has gone quiet is not an idle one.
"""

from collections.abc import Collection
from typing import Final

from controller.domain.cluster import NodeState

LEAST_FLEET: Final = 3
"""Fewer nodes than this that are silent together prove nothing about the controller."""

_MOST_RATIO: Final = 0.5


def most_are_silent(silent: int, connected: int) -> bool:
    """Whether so many nodes are silent at once that the controller itself is to blame.

    Machines fail one by one. When more than half of a fleet falls silent within one lease, it is
    far likelier that the controller was stalled or lost its own network.
    """
    return connected >= LEAST_FLEET and silent > _MOST_RATIO * connected


def believed_seconds(ages: Collection[float | None], stale_seconds: float) -> float:
    """How old a health sample may be now.

    Args:
        ages: of the last sample of every connected node, seconds; None before the first.
        stale_seconds: in ordinary times.

    Returns:
        twice `stale_seconds` while most nodes are silent: one period of grace, and no more, for
        then even a fleet of which nobody hears anything is one that nobody knows anything of.
    """
    known = [age for age in ages if age is not None]
    silent = sum(age > stale_seconds for age in known)
    return 2.0 * stale_seconds if most_are_silent(silent, len(known)) else stale_seconds


def refusal(state: NodeState, health_age: float | None, believed: float) -> str | None:
    """Why a node takes nothing now; None when it does.

    Args:
        health_age: seconds since its last health sample arrived; None before the first.
        believed: how old that may be.
    """
    if state is not NodeState.READY:
        return f"node is {state.value}"
    if health_age is None:
        return "node has not reported its health yet"
    if health_age > believed:
        return f"node's last health report is {health_age:.0f} s old"
    return None
