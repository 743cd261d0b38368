import importlib.util
import random

import pytest

from controller.lab.bench import peers
from controller.lab.bench.peers import PEERS, peer_named
from controller.lab.bench.sample import QueueModel, sample_problem
from controller.routing.problem import RoutingProblem
from tests.unit.controller.routing.problems import least_objective, random_problem

LONG_ENOUGH = 0.5


@pytest.fixture(params=PEERS)
def peer(request: pytest.FixtureRequest) -> peers.Peer:
    name: str = request.param
    found = peer_named(name)
    if found is None:
        pytest.skip(f"{PEERS[name][0]} is not installed")
    return found


def small_problem() -> RoutingProblem:
    return random_problem(3, 4, 3, serial=True, infeasible_share=0.2)


def test_peer_solves_a_small_problem_to_the_optimum(peer: peers.Peer) -> None:
    problem = small_problem()
    objective, milliseconds = peer(problem, LONG_ENOUGH, 0)
    assert objective == pytest.approx(least_objective(problem), abs=1e-6)
    assert milliseconds > 0.0


def test_peer_never_reports_less_than_the_optimum_however_short_its_time(peer: peers.Peer) -> None:
    problem = small_problem()
    for seed in range(3):
        assert peer(problem, 0.0, seed)[0] >= least_objective(problem) - 1e-6


def test_peer_takes_a_batch_of_one_and_requests_that_none_can_take(peer: peers.Peer) -> None:
    single = random_problem(0, 1, 3)
    assert peer(single, LONG_ENOUGH, 0)[0] == pytest.approx(least_objective(single), abs=1e-6)
    partly = random_problem(7, 5, 2, infeasible_share=0.5)
    assert not partly.routable.all()
    assert peer(partly, LONG_ENOUGH, 0)[0] == pytest.approx(least_objective(partly), abs=1e-6)


def test_peer_leaves_the_shared_generator_as_it_was(peer: peers.Peer) -> None:
    before = random.getstate()
    peer(small_problem(), 0.0, 5)
    assert random.getstate() == before


def test_peer_at_a_serving_size_gives_a_sane_objective(peer: peers.Peer) -> None:
    problem = sample_problem(30, 11, 1, QueueModel.SERIAL, 0).problem
    assert 0.0 < peer(problem, 0.05, 0)[0] < 2.0


def test_peer_whose_package_is_absent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [peer_named(name) for name in PEERS] == [None] * len(PEERS)


def test_peer_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError):
        peer_named("oracle")
