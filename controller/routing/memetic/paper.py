"""The memetic search of the CEMA paper, kept exactly: what its figures are compared with.

Source: CEMA-Router, section IV, Algorithms 1 to 3, parameters of section V-C1; where the text
leaves a choice, the routing specification, section 4.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.routing.compiled import (
    Limits,
    compiled_part,
    compiled_without_gil,
    exhausted,
    limits_until,
    random_index,
    random_state,
    random_unit,
    stable_order,
)
from controller.routing.memetic.chromosome import fitness, load_aware, predicted_lengths
from controller.routing.memetic.operators import mutate, tournament, two_point_crossover
from controller.routing.node_loads import Costs, NodeLoads, finish_of, no_loads, own_finish
from controller.routing.objective import legal_destinations, random_legal, scalarise
from controller.routing.policy import UNASSIGNED, Budget, Decision
from controller.routing.problem import FloatArray, IntArray, RoutingProblem


@dataclass(frozen=True, slots=True)
class CemaParameters:
    """The paper's, with its defaults.

    Attributes:
        population: P.
        generations: G.
        tournament: contestants of one selection.
        crossover_probability: p_c.
        mutation_probability: p_m, per gene.
        repair_probability: of repairing an offspring of a crossover.
        repair_trials: L, trial moves of one repair: half worst-gene, half swap.
    """

    population: int = 30
    generations: int = 20
    tournament: int = 3
    crossover_probability: float = 0.9
    mutation_probability: float = 0.1
    repair_probability: float = 0.5
    repair_trials: int = 8

    def __post_init__(self) -> None:
        if min(self.population, self.tournament) < 1:
            raise ValueError("population and tournament must be at least 1")
        if min(self.generations, self.repair_trials) < 0:
            raise ValueError("generations and repair_trials must be at least 0")
        for name in ("crossover_probability", "mutation_probability", "repair_probability"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be 0 to 1, not {getattr(self, name)}")


PAPER_PARAMETERS: Final = CemaParameters()


@dataclass(frozen=True, slots=True)
class CemaPolicy:
    """CEMA-Router's search as published. It gives no lower bound."""

    name: str = "cema"
    parameters: CemaParameters = field(default=PAPER_PARAMETERS)

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """The best assignment after all generations, or when the budget ends."""
        return self.decide_with_history(problem, rng, budget)[0]

    def decide_with_history(
        self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget
    ) -> tuple[Decision, FloatArray]:
        """`decide`, and the best J after the first population and after each generation.

        float64[generations done + 1]; empty when no request can go anywhere.
        """
        started = time.monotonic_ns()
        deadline = None if budget.seconds is None else started + int(budget.seconds * 1e9)
        limits = limits_until(deadline, budget.max_evaluations)
        assignment = np.full(problem.n_requests, UNASSIGNED, dtype=np.int64)
        costs, _, rows, _ = scalarise(problem)
        if not rows.size:
            return Decision(assignment), np.empty(0)
        parameters = self.parameters
        best, history = _evolve(
            costs,
            predicted_lengths(problem, rows),
            parameters.population,
            parameters.generations,
            parameters.tournament,
            parameters.crossover_probability,
            parameters.mutation_probability,
            parameters.repair_probability,
            parameters.repair_trials,
            random_state(rng),
            limits,
        )
        assignment[rows] = best
        return Decision(assignment, evaluations=int(limits.evaluations[0])), history


@compiled_part
def _dominating_request(costs: Costs, x: IntArray, loads: NodeLoads) -> Any:
    """int64: on the node that finishes last, the request whose own finish is the latest."""
    worst = 0
    for n in range(costs.backlog.size):
        if finish_of(costs, loads, n) > finish_of(costs, loads, worst):
            worst = n
    chosen = 0
    longest = -1.0
    for r in range(x.size):
        if costs.node_of[x[r]] == worst:
            own = own_finish(0.0, costs.latency[r, x[r]], costs.network[r, x[r]])
            if own > longest:
                longest, chosen = own, r
    return chosen


@compiled_part
def _repair(
    costs: Costs,
    x: IntArray,
    trials: int,
    legal: IntArray,
    counts: IntArray,
    state: NDArray[np.uint64],
    loads: NodeLoads,
    limits: Limits,
) -> Any:
    """Write the best improving of the trial moves into `x`; float64, its J.

    Source: Algorithm 3.
    """
    best_j = fitness(costs, x, loads)
    limits.evaluations[0] += 1
    worst = _dominating_request(costs, x, loads)
    first = second = -1
    first_to = second_to = -1
    for trial in range(trials):
        r = worst
        s = -1
        if trial < trials // 2:
            to = legal[r, random_index(state, counts[r])]
            if to == x[r]:
                continue
            x_r, x_s = x[r], -1
            x[r] = to
        else:
            r = random_index(state, x.size)
            s = random_index(state, x.size)
            x_r, x_s = x[r], x[s]
            if x_r == x_s or costs.cost[r, x_s] == np.inf or costs.cost[s, x_r] == np.inf:
                continue
            x[r], x[s] = x_s, x_r
        j = fitness(costs, x, loads)
        limits.evaluations[0] += 1
        if j < best_j:
            best_j = j
            first, first_to = r, x[r]
            second, second_to = s, x[s] if s >= 0 else -1
        x[r] = x_r
        if s >= 0:
            x[s] = x_s
    if first >= 0:
        x[first] = first_to
        if second >= 0:
            x[second] = second_to
    return best_j


@compiled_without_gil
def _evolve(
    costs: Costs,
    length: FloatArray,
    population: int,
    generations: int,
    tournament_size: int,
    crossover_probability: float,
    mutation_probability: float,
    repair_probability: float,
    repair_trials: int,
    state: NDArray[np.uint64],
    limits: Limits,
) -> tuple[IntArray, FloatArray]:
    """The best chromosome, and the best J of each generation.

    Source: Algorithm 1.
    """
    n_requests = costs.cost.shape[0]
    legal, counts = legal_destinations(costs)
    loads = no_loads(costs.backlog.size)
    # Parents stand in the first half, offspring in the second.
    chromosomes = np.zeros((2 * population, n_requests), dtype=np.int64)
    scores = np.full(2 * population, np.inf)
    load_aware(costs, length, chromosomes[0])
    for p in range(1, population):
        random_legal(legal, counts, state, chromosomes[p])
    for p in range(population):
        scores[p] = fitness(costs, chromosomes[p], loads)
        limits.evaluations[0] += 1
    history = np.empty(generations + 1)
    history[0] = scores[:population].min()
    done = 0
    while done < generations and not exhausted(limits):
        parents = scores[:population]
        for p in range(population, 2 * population):
            scores[p] = np.inf
        for p in range(population, 2 * population):
            if exhausted(limits):
                break
            child = chromosomes[p]
            mother = tournament(parents, tournament_size, state)
            father = tournament(parents, tournament_size, state)
            crossed = random_unit(state) < crossover_probability
            if crossed:
                two_point_crossover(chromosomes[mother], chromosomes[father], state, child)
            else:
                child[:] = chromosomes[mother]
            mutate(child, mutation_probability, legal, counts, state)
            if crossed and random_unit(state) < repair_probability:
                scores[p] = _repair(
                    costs, child, repair_trials, legal, counts, state, loads, limits
                )
            else:
                scores[p] = fitness(costs, child, loads)
                limits.evaluations[0] += 1
        order = stable_order(scores)
        chromosomes = chromosomes[order]
        scores = scores[order]
        done += 1
        history[done] = scores[0]
    best = np.argmin(scores[:population])
    return chromosomes[best].copy(), history[: done + 1].copy()
