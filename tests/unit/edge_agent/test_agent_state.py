import itertools

import pytest

from edge_agent.agent_state import AgentState, agent_state
from edge_agent.serving.lifecycle import ModelPhase

LOADING, READY, FAILED = ModelPhase.LOADING, ModelPhase.READY, ModelPhase.FAILED
UNLOADED, DOWNLOADING = ModelPhase.UNLOADED, ModelPhase.DOWNLOADING


@pytest.mark.parametrize(
    ("is_connected", "phases", "state"),
    [
        (False, [], AgentState.STARTING),
        (True, [], AgentState.DEGRADED),
        (False, [LOADING], AgentState.LOADING),
        (True, [LOADING], AgentState.LOADING),
        (True, [LOADING, FAILED], AgentState.LOADING),
        (True, [READY], AgentState.READY),
        (True, [READY, LOADING, FAILED], AgentState.READY),
        (False, [READY], AgentState.DEGRADED),
        (True, [FAILED], AgentState.DEGRADED),
        (False, [FAILED, FAILED], AgentState.DEGRADED),
        (True, [DOWNLOADING, UNLOADED], AgentState.LOADING),
        (True, [UNLOADED, UNLOADED], AgentState.READY),
        (False, [UNLOADED], AgentState.DEGRADED),
        (True, [UNLOADED, FAILED], AgentState.DEGRADED),
    ],
)
def test_state_follows_from_link_and_models(
    is_connected: bool, phases: list[ModelPhase], state: AgentState
) -> None:
    assert agent_state(False, False, is_connected, phases) is state
    assert agent_state(False, True, is_connected, phases) is AgentState.DRAINING
    assert agent_state(True, False, is_connected, phases) is AgentState.STOPPED
    assert agent_state(True, True, is_connected, phases) is AgentState.STOPPED


def test_ready_means_connected_with_models_that_answer_when_asked_and_nothing_else() -> None:
    for flags in itertools.product([False, True], repeat=3):
        for count in range(3):
            for phases in itertools.product(ModelPhase, repeat=count):
                is_ready = agent_state(*flags, phases) is AgentState.READY
                can_answer = READY in phases or (set(phases) == {UNLOADED})
                assert is_ready == (flags == (False, False, True) and can_answer)


def test_phases_may_come_as_an_iterator() -> None:
    assert agent_state(False, False, True, iter([FAILED, READY])) is AgentState.READY
