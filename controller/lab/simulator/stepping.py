"""A simulated cluster that is asked step by step: a query arrives, its destination is chosen.

The runner drives policies; this is for callers that choose by themselves, such as the Gymnasium
environment.
"""

from dataclasses import dataclass

import numpy as np

from controller.lab.simulator.engine import Cluster, ClusterState, SimulatedCompletion
from controller.lab.simulator.scenario import Scenario
from controller.routing.problem import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class OpenDestinations:
    """Where a query may go: K destinations, always in the scenario's order.

    Attributes:
        quality: float64[K]; predicted, 0 to 1.
        service_seconds: float64[K]; predicted inference time.
        wait_seconds: float64[K]; predicted, until it could start.
        energy_joules, cost_usd: float64[K]; of this query there.
        node_index: int64[K].
        configuration_index: int64[K].
        feasible: bool[K]; its node is up.
    """

    quality: FloatArray
    service_seconds: FloatArray
    wait_seconds: FloatArray
    energy_joules: FloatArray
    cost_usd: FloatArray
    node_index: IntArray
    configuration_index: IntArray
    feasible: BoolArray


class SteppedCluster:
    """A cluster between decisions.

    Args:
        scenario: whose queries arrive.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._cluster = Cluster(scenario.slots)
        self._query: int | None = None
        self._sent = 0

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self._cluster.now

    def arrive(
        self, query: int, at_seconds: float
    ) -> tuple[OpenDestinations, list[SimulatedCompletion]]:
        """Let time pass until a query arrives; where it may go, and what ended meanwhile.

        Completions name requests by the number that `assign` gave.

        Raises:
            ValueError: the last query was not assigned, there is no such query, or the time has
                passed already.
        """
        if self._query is not None:
            raise ValueError("the last query is not assigned yet; call assign first")
        if not 0 <= query < self.scenario.queries:
            raise ValueError(f"there is no query {query}; 0 to {self.scenario.queries - 1}")
        scenario, completed = self.scenario, self._cluster.advance(at_seconds)
        self._query = query
        return (
            OpenDestinations(
                quality=scenario.pair_quality[query],
                service_seconds=scenario.pair_seconds[query],
                wait_seconds=self._cluster.waits()[scenario.node_of],
                energy_joules=scenario.pair_energy[query],
                cost_usd=scenario.pair_cost[query],
                node_index=scenario.node_of,
                configuration_index=scenario.model_of,
                feasible=self._cluster.up[scenario.node_of],
            ),
            completed,
        )

    def assign(self, destination: int, luck: float = 0.0) -> int:
        """Send the query that arrived; the number of the request, from 0.

        Args:
            destination: index among the candidates.
            luck: standard normal deviate of the log service time.

        Raises:
            ValueError: no query has arrived, or the destination is not feasible.
        """
        if self._query is None:
            raise ValueError("no query has arrived; call arrive first")
        scenario, query = self.scenario, self._query
        if not 0 <= destination < scenario.node_of.size:
            raise ValueError(f"there is no destination {destination}")
        node = int(scenario.node_of[destination])
        real = float(scenario.pair_true_seconds[query, destination])
        real *= float(np.exp(scenario.noise * luck - 0.5 * scenario.noise**2))
        self._cluster.send(self._sent, node, float(scenario.pair_seconds[query, destination]), real)
        self._query = None
        self._sent += 1
        return self._sent - 1

    def fail(self, node: int) -> list[int]:
        """Take a node down; the requests that were there. They are for the caller to send again."""
        return [lost.request for lost in self._cluster.fail(node)]

    def join(self, node: int) -> None:
        """Bring a node up, with nothing to do."""
        self._cluster.join(node)

    def state(self) -> ClusterState:
        """Use and queue of every node."""
        return self._cluster.state()
