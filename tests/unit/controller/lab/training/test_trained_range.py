"""A policy decides by itself on the live cluster that it was trained on, strange states aside."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from controller.domain.cluster import ClusterSnapshot
from controller.ids import NodeId
from controller.lab.bench.live_fleet import LiveFleet, profiler_of, speed_ratios
from controller.lab.simulator.inputs import SimulationInputs, synthetic_inputs
from controller.lab.simulator.scenario_file import read_scenario
from controller.lab.training.export import artifact_of
from controller.lab.training.ppo import Trainer
from controller.lab.training.recipes import recipe
from controller.lab.training.scenario_world import world_of
from controller.routing.formulation import FormulatedBatch, formulate
from controller.routing.policy import Budget, FallbackCause
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.routing.ppo.policy import LearnedPolicy
from tests.unit.controller.routing.clusters import request

CLUSTER = read_scenario("drlm")
INPUTS = synthetic_inputs(CLUSTER)
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", params=[("ppo", 48), ("ppo-set", 12)])
def policy(request: pytest.FixtureRequest) -> LearnedPolicy:
    torch.set_num_threads(1)
    name, episodes = request.param
    settings, traffic = recipe(name, episodes, 0)
    trainer = Trainer([world_of(CLUSTER, INPUTS)], settings, traffic)
    trainer.train()
    return LearnedPolicy(name, artifact_of(trainer, "drlm"))


def _formulated(
    snapshot: ClusterSnapshot, inputs: SimulationInputs, query: int, number: int
) -> FormulatedBatch:
    """As fitted predictors would have it, which know a class of devices."""
    pair_of = {name: at for at, name in enumerate(inputs.pairs)}
    kinds = {node.node_id: node.device.kind for node in snapshot.nodes if node.device}
    pairs = [pair_of[f"{d.model}@{kinds[d.node_id]}"] for d in snapshot.destinations]
    models = {model.name: at for at, model in enumerate(CLUSTER.configurations)}
    columns = [models[d.model] for d in snapshot.destinations]
    return formulate(
        [request(f"query-{number}")],
        snapshot,
        DRLM_WEIGHTS,
        quality=inputs.quality[query, columns][None, :],
        output_tokens=np.full((1, len(columns)), 100.0),
        inference_seconds=inputs.seconds[query, pairs][None, :] / speed_ratios(CLUSTER, snapshot),
    )


def test_a_live_fleet_under_its_traffic_is_in_range(policy: LearnedPolicy) -> None:
    fleet, now, fallbacks = LiveFleet(CLUSTER), 0.0, 0
    for number in range(100):
        now += RNG.exponential(1.0)
        fleet.advance(now)
        query = int(RNG.integers(INPUTS.quality.shape[0]))
        batch = _formulated(fleet.snapshot(now), INPUTS, query, number)
        decision = policy.decide(batch.problem, RNG, Budget())
        fallbacks += decision.fallbacks.get(FallbackCause.OUT_OF_RANGE, 0)
        fleet.send(batch, request(f"query-{number}"), int(decision.assignment[0]), now)
    assert fallbacks <= 5


def _with_backlogs(snapshot: ClusterSnapshot, seconds: dict[NodeId, float]) -> ClusterSnapshot:
    nodes = [replace(n, backlog_seconds=seconds.get(n.node_id, 0.0)) for n in snapshot.nodes]
    return replace(snapshot, nodes=tuple(nodes))


def test_a_node_that_is_busy_by_others_will_is_in_range(policy: LearnedPolicy) -> None:
    """Requests that name a model or a node queue where no policy would have sent them."""
    idle = profiler_of(CLUSTER).snapshot(0.0)
    for node in idle.nodes[::7]:
        busy = _with_backlogs(idle, {node.node_id: 12.0})
        assert policy.decide(_formulated(busy, INPUTS, 0, 0).problem, RNG, Budget()).fallbacks == {}


def test_hours_of_work_ahead_and_answers_of_an_hour_are_out_of_range(
    policy: LearnedPolicy,
) -> None:
    idle = profiler_of(CLUSTER).snapshot(0.0)
    slow = replace(INPUTS, seconds=INPUTS.seconds * 1000.0)
    flooded = _with_backlogs(idle, {node.node_id: 7200.0 for node in idle.nodes})
    for snapshot, inputs in ((flooded, INPUTS), (idle, slow)):
        problem = _formulated(snapshot, inputs, 0, 0).problem
        decision = policy.decide(problem, RNG, Budget())
        assert decision.fallbacks == {FallbackCause.OUT_OF_RANGE: 1}
        assert "trained were" in decision.fallback_reason
        assert problem.feasible[0, decision.assignment[0]]
    calm = policy.decide(_formulated(idle, INPUTS, 0, 0).problem, RNG, Budget())
    assert calm.fallbacks == {}
