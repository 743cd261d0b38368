import numpy as np
import pytest

from controller.domain.cluster import NodeKind
from controller.lab.bench.sample import MODELS, QueueModel, sample_fleet, sample_problem
from controller.routing.problem import EmptyBatch, Normalisation


def test_sampled_problem_has_the_size_asked_for_and_is_routable() -> None:
    batch = sample_problem(12, 7, 3, QueueModel.BATCHED, seed=4)
    problem = batch.problem
    assert (problem.n_requests, problem.n_nodes, problem.n_destinations) == (12, 7, 21)
    assert problem.routable.all()
    assert problem.normalisation is Normalisation.PAYOFF
    assert len(batch.snapshot.destinations) == 21


def test_same_seed_gives_the_same_problem_and_another_another() -> None:
    first, again, other = (
        sample_problem(9, 4, 2, QueueModel.SERIAL, seed).problem for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.quality, again.quality)
    np.testing.assert_array_equal(first.work_seconds, again.work_seconds)
    assert not np.array_equal(first.quality, other.quality)


def test_serial_engine_occupies_its_executor_as_long_as_a_request_takes() -> None:
    serial = sample_problem(9, 5, 2, QueueModel.SERIAL, 3).problem
    np.testing.assert_allclose(serial.work_seconds, serial.latency_seconds)
    batched = sample_problem(9, 5, 2, QueueModel.BATCHED, 3).problem
    assert (batched.work_seconds <= batched.latency_seconds + 1e-12).all()
    assert (batched.work_seconds < 0.5 * batched.latency_seconds).any()


def test_fleet_has_every_class_of_machine_and_prices_only_in_the_cloud() -> None:
    fleet = sample_fleet(np.random.default_rng(0), 10, 4, QueueModel.BATCHED)
    kinds = {node.node_id: node.kind for node in fleet.nodes}
    assert set(kinds.values()) == {NodeKind.EDGE, NodeKind.CLOUD}
    assert [node.node_id for node in fleet.nodes] == sorted(kinds)
    for destination in fleet.destinations:
        is_free = destination.price.prompt_usd_per_token == 0.0
        assert is_free == (kinds[destination.node_id] is NodeKind.EDGE)
    pairs = [(d.node_id, d.model) for d in fleet.destinations]
    assert pairs == sorted(set(pairs))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(EmptyBatch):
        sample_problem(0, 2, 1, QueueModel.SERIAL, 0)
    with pytest.raises(ValueError, match="node"):
        sample_problem(2, 0, 1, QueueModel.SERIAL, 0)
    with pytest.raises(ValueError, match="models per node"):
        sample_problem(2, 2, len(MODELS) + 1, QueueModel.SERIAL, 0)
