"""Other people's solvers under the same time budget; each only where it is installed."""

import importlib.util
import random
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from controller.routing.evaluator import evaluate
from controller.routing.exact import solve_programme
from controller.routing.objective import bounds_of, objectives, scalarise
from controller.routing.policy import UNASSIGNED
from controller.routing.problem import FloatArray, IntArray, RoutingProblem

Peer: TypeAlias = Callable[[RoutingProblem, float, int], tuple[float, float]]
"""(problem, budget in seconds, seed) -> (J, milliseconds taken)."""

POPULATION: Final = 100
"""Of the genetic algorithms: the default of one and of the other's examples."""

CROSSOVER_PROBABILITY: Final = 0.9

MUTATION_PROBABILITY: Final = 0.5
"""Of mutating an individual at all, in DEAP's loop; then each gene with `GENE_PROBABILITY`."""

GENE_PROBABILITY: Final = 0.1

TOURNAMENT: Final = 3


def highs(problem: RoutingProblem, budget_seconds: float, seed: int) -> tuple[float, float]:
    """HiGHS on the mixed-integer programme, from nothing.

    Where it finds no assignment in time, J is that of the earliest-finish one, which a caller
    would have to fall back to.
    """
    del seed
    scalarised = scalarise(problem)
    started = time.perf_counter()
    found, _, _ = solve_programme(scalarised.costs, 1e6, budget_seconds)
    elapsed = time.perf_counter() - started
    best = scalarised.seeds[3] if found is None else found
    return float(_Scorer(problem)(np.asarray(best)[None, :])[0]), 1e3 * elapsed


class _Scorer:
    """J of assignments of the routable requests, whole populations at once.

    Attributes:
        choices: a routable request's feasible destinations; a gene is an index into them.
    """

    def __init__(self, problem: RoutingProblem) -> None:
        self._problem = problem
        self._bounds = bounds_of(problem)
        self.choices = [np.flatnonzero(row) for row in problem.feasible[problem.routable]]

    def __call__(self, assignments: IntArray) -> FloatArray:
        """J of int64[P, rows] destinations; float64[P]."""
        problem = self._problem
        whole = np.full((len(assignments), problem.n_requests), UNASSIGNED, dtype=np.int64)
        whole[:, problem.routable] = assignments
        return objectives(problem, evaluate(problem, whole), self._bounds)

    def of_genes(self, genes: Any) -> FloatArray:
        """J of indices into `choices`, [P, rows]; float64[P]."""
        columns = np.asarray(genes).astype(np.int64)
        picked = [choice[columns[:, r]] for r, choice in enumerate(self.choices)]
        return self(np.stack(picked, axis=1))


def pymoo_ga(problem: RoutingProblem, budget_seconds: float, seed: int) -> tuple[float, float]:
    """The genetic algorithm of pymoo over integers, whole populations scored by our evaluator."""
    from pymoo.algorithms.soo.nonconvex.ga import GA
    from pymoo.core.problem import Problem
    from pymoo.operators.crossover.pntx import TwoPointCrossover
    from pymoo.operators.mutation.pm import PM
    from pymoo.operators.repair.rounding import RoundingRepair
    from pymoo.operators.sampling.rnd import IntegerRandomSampling

    scorer = _Scorer(problem)
    greatest = np.array([choice.size - 1 for choice in scorer.choices])

    class Assignment(Problem):  # type: ignore[misc, unused-ignore]  # pymoo has no types
        def __init__(self) -> None:
            super().__init__(n_var=greatest.size, n_obj=1, xl=0, xu=greatest, vtype=int)

        def _evaluate(self, x: Any, out: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            out["F"] = scorer.of_genes(x)

    algorithm = GA(
        pop_size=POPULATION,
        sampling=IntegerRandomSampling(),
        crossover=TwoPointCrossover(),
        mutation=PM(vtype=float, repair=RoundingRepair()),
        eliminate_duplicates=True,
    )
    started = time.perf_counter()
    # Its own loop looks at the clock after a generation, and so does this one, without its display.
    algorithm.setup(Assignment(), seed=seed, verbose=False, save_history=False)
    while True:
        algorithm.next()
        elapsed = time.perf_counter() - started
        if elapsed >= budget_seconds:
            return float(algorithm.opt[0].F[0]), 1e3 * elapsed


def deap_ga(problem: RoutingProblem, budget_seconds: float, seed: int) -> tuple[float, float]:
    """The simple genetic algorithm of DEAP, a generation at a time until the budget ends."""
    from deap import algorithms, base, creator, tools

    scorer = _Scorer(problem)
    sizes = [choice.size for choice in scorer.choices]
    if not hasattr(creator, "RoutingChromosome"):  # its classes are global
        creator.create("RoutingFitness", base.Fitness, weights=(-1.0,))
        creator.create("RoutingChromosome", list, fitness=creator.RoutingFitness)
    before = random.getstate()
    random.seed(seed)  # the only generator that DEAP's operators draw from

    def mutated(chromosome: Any) -> tuple[Any]:
        for r, size in enumerate(sizes):
            if random.random() < GENE_PROBABILITY:
                chromosome[r] = random.randrange(size)
        return (chromosome,)

    def scored(evaluate_one: Any, chromosomes: Any) -> list[tuple[float]]:
        """In place of DEAP's map: all at once, or it would only measure our call overhead."""
        del evaluate_one
        waiting = list(chromosomes)
        return [(float(j),) for j in scorer.of_genes(waiting)] if waiting else []

    toolbox = base.Toolbox()
    toolbox.register("evaluate", scorer.of_genes)
    toolbox.register("map", scored)
    toolbox.register("mate", tools.cxTwoPoint if len(sizes) > 1 else lambda one, two: (one, two))
    toolbox.register("mutate", mutated)
    toolbox.register("select", tools.selTournament, tournsize=TOURNAMENT)
    best = tools.HallOfFame(1)
    try:
        started = time.perf_counter()
        population = [
            creator.RoutingChromosome([random.randrange(size) for size in sizes])
            for _ in range(POPULATION)
        ]
        while True:
            population, _ = algorithms.eaSimple(
                population,
                toolbox,
                CROSSOVER_PROBABILITY,
                MUTATION_PROBABILITY,
                1,
                halloffame=best,
                verbose=False,
            )
            elapsed = time.perf_counter() - started
            if elapsed >= budget_seconds:
                return float(best[0].fitness.values[0]), 1e3 * elapsed
    finally:
        random.setstate(before)


PEERS: Final[dict[str, tuple[str, Peer]]] = {
    "highs": ("scipy", highs),
    "pymoo-ga": ("pymoo", pymoo_ga),
    "deap-ga": ("deap", deap_ga),
}
"""By name: the package that must be there, and the solver."""


def peer_named(name: str) -> Peer | None:
    """The peer, or None when its package is not installed.

    Raises:
        KeyError: no peer has the name.
    """
    package, peer = PEERS[name]
    return peer if importlib.util.find_spec(package) is not None else None
