import numpy as np
import pytest

from controller.domain.cluster import ClusterSnapshot
from controller.domain.request import InferenceRequest, Sampling
from controller.lab.bench.live_fleet import LiveFleet, profiler_of, speed_ratios
from controller.lab.simulator.engine import Cluster
from controller.lab.simulator.scenario_file import read_scenario
from controller.routing.formulation import FormulatedBatch, formulate
from tests.unit.controller.routing.clusters import request

CLUSTER = read_scenario("drlm")


def _asked(number: int) -> InferenceRequest:
    return request(f"query-{number}", sampling=Sampling(max_tokens=200))


def _formulated(
    asked: InferenceRequest, snapshot: ClusterSnapshot, seconds: float
) -> FormulatedBatch:
    """The engine takes so many seconds for 100 tokens, anywhere."""
    shape = (1, len(snapshot.destinations))
    return formulate(
        [asked],
        snapshot,
        output_tokens=np.full(shape, 100.0),
        inference_seconds=np.full(shape, seconds),
    )


def test_the_papers_cluster_becomes_a_snapshot_with_all_its_placements():
    snapshot = profiler_of(CLUSTER).snapshot(0.0)
    assert len({destination.node_id for destination in snapshot.destinations}) == 64
    pairs = {(d.node_id, d.model) for d in snapshot.destinations}
    assert len(pairs) == len(snapshot.destinations) == CLUSTER.destinations[0].size
    kinds = {node.device.kind for node in snapshot.nodes if node.device is not None}
    assert kinds == {"RP", "NJN", "JON", "JOA", "VM"}


def test_every_destination_is_as_fast_as_its_node():
    """Snapshots are in the order of the nodes' names, descriptions are not."""
    snapshot = profiler_of(CLUSTER).snapshot(0.0)
    found = {
        (destination.node_id.rsplit("-", 1)[0], ratio)
        for destination, ratio in zip(
            snapshot.destinations, speed_ratios(CLUSTER, snapshot), strict=True
        )
    }
    assert found == {(group.name, group.speed_ratio) for group in CLUSTER.groups}


def test_nodes_have_about_as_much_ahead_as_in_the_simulator() -> None:
    """What the profiler makes of claims, tokens and ends, beside the simulator's own queues.

    Within what a controller can tell: of a request that has streamed nothing it does not know
    whether it has begun.
    """
    rng = np.random.default_rng(0)
    simulated = Cluster(np.ones(len(CLUSTER.node_names), dtype=np.int64))
    fleet, index = LiveFleet(CLUSTER), {name: at for at, name in enumerate(CLUSTER.node_names)}
    now, found, expected = 0.0, [], []
    for number in range(150):
        now += rng.exponential(1.0)
        fleet.advance(now)
        simulated.advance(now)
        snapshot, waits = fleet.snapshot(now), simulated.waits()
        for node in snapshot.nodes:
            wait = waits[index[node.node_id]]
            assert (node.backlog_seconds > 0.0) == (wait > 0.0)
            if wait > 0.0:
                found.append(node.backlog_seconds)
                expected.append(wait)
        columns = [at for at, d in enumerate(snapshot.destinations) if d.node_id.startswith("nano")]
        asked, seconds, column = _asked(number), rng.uniform(2.0, 8.0), int(rng.choice(columns))
        fleet.send(_formulated(asked, snapshot, seconds), asked, column, now)
        node_id = snapshot.destinations[column].node_id
        simulated.send(number, index[node_id], seconds, seconds)
    assert len(found) > 300
    assert np.mean(found) == pytest.approx(np.mean(expected), rel=0.2)
    assert np.corrcoef(found, expected)[0, 1] > 0.9


def test_a_rested_fleet_is_idle_and_has_learned_from_what_it_answered() -> None:
    fleet, now = LiveFleet(CLUSTER), 0.0
    before = fleet.snapshot(now)
    for number in range(20):
        asked = _asked(number)
        fleet.send(_formulated(asked, before, 4.0), asked, 7, now)
        claimed = fleet.snapshot(now).destinations[7]
        assert claimed.free_slots == before.destinations[7].slots - 1
        now += 600.0
        fleet.advance(now)
        assert all(node.backlog_seconds == 0.0 for node in fleet.snapshot(now).nodes)
    after = fleet.snapshot(now).destinations
    assert after[7].answer_lengths is not None
    assert after[7].calibration.decode_tokens_per_second == pytest.approx(100 / 3.6, rel=0.1)
    assert after[:7] == before.destinations[:7]
