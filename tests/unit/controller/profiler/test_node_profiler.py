import pytest

from controller.domain.cluster import NodeState
from controller.profiler.node_profiler import believed_seconds, most_are_silent, refusal

STALE = 10.0


@pytest.mark.parametrize("state", [s for s in NodeState if s is not NodeState.READY])
def test_only_ready_nodes_take_work(state: NodeState) -> None:
    assert refusal(state, 0.0, STALE) == f"node is {state.value}"


def test_unknown_and_stale_health_refuse() -> None:
    assert refusal(NodeState.READY, None, STALE) is not None
    assert refusal(NodeState.READY, STALE, STALE) is None
    assert refusal(NodeState.READY, STALE + 1, STALE) is not None


def test_one_silent_node_among_many_is_stale_in_time() -> None:
    assert believed_seconds([0.1, 0.2, 11.0, 0.3], STALE) == STALE


def test_most_nodes_silent_at_once_is_the_controllers_own_fault() -> None:
    """One period of grace."""
    assert believed_seconds([11.0, 11.2, 10.8, 0.3], STALE) == 2 * STALE
    assert refusal(NodeState.READY, 11.0, 2 * STALE) is None
    assert refusal(NodeState.READY, 21.0, 2 * STALE) is not None


@pytest.mark.parametrize(
    ("silent", "connected", "expected"),
    [(1, 1, False), (2, 2, False), (2, 3, True), (2, 4, False), (3, 4, True), (0, 10, False)],
)
def test_a_majority_of_at_least_three_nodes_is_most(
    silent: int, connected: int, expected: bool
) -> None:
    assert most_are_silent(silent, connected) is expected
