"""What the agent as a whole is doing, as it follows from its parts (pure)."""

import enum
from collections.abc import Iterable

from edge_agent.serving.lifecycle import ModelPhase


class AgentState(enum.Enum):
    """What the agent is doing, for `status`."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEGRADED = "degraded"
    STOPPED = "stopped"


def agent_state(
    is_stopping: bool, is_draining: bool, is_connected: bool, phases: Iterable[ModelPhase]
) -> AgentState:
    """The state that follows from the parts.

    READY means connected with a model that answers, or with all of them unloaded on purpose, for
    each of those is loaded when it is asked for.
    """
    found = list(phases)
    if is_stopping:
        return AgentState.STOPPED
    if is_draining:
        return AgentState.DRAINING
    if ModelPhase.READY in found:
        return AgentState.READY if is_connected else AgentState.DEGRADED
    if ModelPhase.LOADING in found or ModelPhase.DOWNLOADING in found:
        return AgentState.LOADING
    if not found:
        return AgentState.DEGRADED if is_connected else AgentState.STARTING
    if all(phase is ModelPhase.UNLOADED for phase in found):
        return AgentState.READY if is_connected else AgentState.DEGRADED
    return AgentState.DEGRADED
