"""Routing problems of a simulated cluster, made fast enough to route tens of thousands a second."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.lab.simulator.scenario import Scenario
from controller.routing.problem import (
    BoolArray,
    FloatArray,
    ProblemMetadata,
    RoutingProblem,
)


@dataclass(frozen=True, slots=True, eq=False)
class PrecheckedProblem(RoutingProblem):
    """A `RoutingProblem` over arrays that have been checked before, which checks nothing.

    Checking 959 destinations takes longer than most policies think.
    """

    def __post_init__(self) -> None:
        """Believe the arrays."""


class ProblemSource:
    """Makes the problem of each decision in one scenario.

    Args:
        scenario: whose destinations are the columns.
        weights: float64[4]; quality, cost, energy, time.

    Raises:
        ProblemError: the weights or the scenario's arrays make no problem.
    """

    def __init__(self, scenario: Scenario, weights: FloatArray) -> None:
        self._scenario = scenario
        zeros = np.zeros((scenario.queries, scenario.node_of.size))
        # Everything that problems are cut from passes the constructor once.
        whole = RoutingProblem(
            quality=scenario.pair_quality,
            cost_usd=scenario.pair_cost,
            energy_joules=scenario.pair_energy,
            work_seconds=scenario.pair_work,
            latency_seconds=scenario.pair_seconds,
            network_seconds=zeros,
            node_of=scenario.node_of,
            backlog_seconds=np.zeros(scenario.nodes),
            feasible=np.ones(zeros.shape, dtype=np.bool_),
            weights=weights,
            metadata=ProblemMetadata(
                model_of=scenario.model_of,
                slots=scenario.slots[scenario.node_of],
                parameters_billions=scenario.parameters_billions[scenario.model_of],
                node_is_edge=scenario.is_edge,
                node_key=scenario.node_keys,
                model_key=scenario.model_keys[scenario.model_of],
            ),
        )
        self._whole = whole
        self._up: bytes = b""
        self._allowed: BoolArray = np.ones((1, scenario.node_of.size), dtype=np.bool_)

    def problem(self, query: Sequence[int], waits: FloatArray, up: BoolArray) -> RoutingProblem:
        """The problem of a batch.

        Args:
            query: R indices, at least one.
            waits: float64[N]; becomes read-only.
            up: bool[N].
        """
        whole, state = self._whole, up.tobytes()
        if state != self._up:
            self._up = state
            self._allowed = np.ascontiguousarray(up[whole.node_of][None, :])
            self._allowed.flags.writeable = False
        waits.flags.writeable = False
        count = len(query)
        if count == 1:
            row = slice(query[0], query[0] + 1)
            return PrecheckedProblem(
                whole.quality[row],
                whole.cost_usd[row],
                whole.energy_joules[row],
                whole.work_seconds[row],
                whole.latency_seconds[row],
                whole.network_seconds[row],
                whole.node_of,
                waits,
                self._allowed,
                whole.weights,
                metadata=whole.metadata,
            )
        names = ("quality", "cost_usd", "energy_joules", "work_seconds", "latency_seconds")
        rows = {name: getattr(whole, name)[query] for name in (*names, "network_seconds")}
        rows["feasible"] = self._allowed.repeat(count, axis=0)
        for values in rows.values():
            values.flags.writeable = False
        return PrecheckedProblem(
            **rows,
            node_of=whole.node_of,
            backlog_seconds=waits,
            weights=whole.weights,
            metadata=whole.metadata,
        )
