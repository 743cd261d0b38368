import numpy as np
import pytest

from controller.routing.ppo.observation import (
    Layout,
    layout_observation,
    queue_inputs,
    vector_size,
)
from controller.routing.ppo.training_range import OutOfRange, check_range, vector_in_range

LAYOUT = Layout(
    model_keys=np.array([1, 2]),
    node_keys=np.array([3, 4, 5]),
    kind_of_node=np.array([0, 0, 1]),
    choice_of_model=np.array([0, 1]),
    level_of_model=np.array([0, 0]),
    deployed=np.array([[True, True, True], [False, False, True]]),
)


def _vector(waiting: list[float], seconds: float = 2.0) -> np.ndarray:
    seen = layout_observation(
        LAYOUT,
        quality=np.array([[0.5, 0.8]]),
        seconds=np.full((1, 2, 2), seconds),
        waiting=np.array([waiting]),
        mask=LAYOUT.deployed[None],
        weights=np.full((1, 4), 0.25),
    )
    return seen.vector[0]


# In the training the third node alone was busy, for up to 30 s.
_SEEN = np.stack([_vector([0.0, 0.0, wait]) for wait in (0.0, 10.0, 30.0)])
LOWEST, HIGHEST = _SEEN.min(axis=0), _SEEN.max(axis=0)


def _encoded(vector: np.ndarray) -> np.ndarray:
    return vector_in_range(LAYOUT, vector, LOWEST, HIGHEST)


def test_what_was_seen_or_nearly_so_reaches_the_network_as_it_is() -> None:
    assert _SEEN.shape[1] == vector_size(LAYOUT)
    for vector in (*_SEEN, _vector([0.0, 0.0, 40.0])):
        assert _encoded(vector) is vector
        check_range(vector, LOWEST, HIGHEST)


def test_a_queue_at_a_node_that_was_never_used_is_shown_as_none() -> None:
    strange = _vector([12.0, 0.0, 10.0])
    with pytest.raises(OutOfRange):
        check_range(strange, LOWEST, HIGHEST)
    waits, idles = queue_inputs(LAYOUT)
    encoded = _encoded(strange)
    assert encoded[waits].tolist() == _SEEN[1][waits].tolist()
    assert encoded[idles].tolist() == [1.0, 1.0, 0.0]
    others = np.ones(strange.size, dtype=np.bool_)
    others[waits] = others[idles] = False
    assert encoded[others].tolist() == strange[others].tolist()


@pytest.mark.parametrize(
    ("waiting", "seconds", "message"),
    [
        ([900.0, 0.0, 0.0], 2.0, "a node has 900 s of work ahead, trained were up to 30"),
        ([0.0, 0.0, 900.0], 2.0, "a node has 900 s of work ahead, trained were up to 30"),
        ([0.0, 0.0, 0.0], 5000.0, "input 2 lies in"),
        ([12.0, 0.0, 0.0], 5000.0, "input 2 lies in"),
    ],
)
def test_queues_longer_than_any_and_other_strange_inputs_are_out_of_range(
    waiting: list[float], seconds: float, message: str
) -> None:
    with pytest.raises(OutOfRange, match=message):
        _encoded(_vector(waiting, seconds))
