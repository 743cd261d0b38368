import numpy as np
import pytest

from controller.routing.memetic.paper import CemaParameters, CemaPolicy
from controller.routing.policy import Budget
from tests.unit.controller.routing.problems import objective_of, random_problem

UNLIMITED = Budget(seconds=None)


def test_parameters_of_the_paper_are_the_defaults() -> None:
    parameters = CemaParameters()
    assert (parameters.population, parameters.generations, parameters.tournament) == (30, 20, 3)
    assert parameters.crossover_probability == 0.9
    assert parameters.mutation_probability == 0.1
    assert parameters.repair_probability == 0.5
    assert parameters.repair_trials == 8


@pytest.mark.parametrize(
    "changes",
    [{"population": 0}, {"tournament": 0}, {"generations": -1}, {"mutation_probability": 1.5}],
)
def test_parameters_that_mean_nothing_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        CemaParameters(**changes)  # type: ignore[arg-type]


def test_best_never_gets_worse_from_one_generation_to_the_next() -> None:
    problem = random_problem(3, 30, 11, serial=True)
    policy = CemaPolicy()
    decision, history = policy.decide_with_history(problem, np.random.default_rng(4), UNLIMITED)
    assert history.shape == (21,)
    assert (np.diff(history) <= 0.0).all()
    assert history[-1] < history[0]
    assert history[-1] == pytest.approx(objective_of(problem, decision.assignment))


def test_work_of_one_search_is_what_the_papers_parameters_imply() -> None:
    """30 first ones, then 600 offspring, of which 45 % are repaired with up to 8 trials."""
    decision = CemaPolicy().decide(random_problem(3, 30, 11), np.random.default_rng(4), UNLIMITED)
    assert 630 < decision.evaluations <= 630 + 600 * 8
    assert 2000 < decision.evaluations < 3200


def test_without_generations_the_load_aware_seed_competes_with_random_ones() -> None:
    problem = random_problem(8, 20, 6, serial=True, weights=(0.0, 0.0, 0.0, 1.0))
    parameters = CemaParameters(population=1, generations=0)
    seed = CemaPolicy(parameters=parameters)
    alone = seed.decide(problem, np.random.default_rng(0), UNLIMITED).assignment
    first = [seed.decide(problem, np.random.default_rng(s), UNLIMITED).assignment for s in (1, 2)]
    assert alone.tolist() == first[0].tolist() == first[1].tolist()
    rng = np.random.default_rng(5)
    drawn = [rng.integers(6, size=20) for _ in range(30)]
    assert objective_of(problem, alone) < min(objective_of(problem, x) for x in drawn)


def test_search_ends_at_its_evaluation_budget() -> None:
    budget = Budget(seconds=None, max_evaluations=100)
    decision = CemaPolicy().decide(random_problem(3, 30, 11), np.random.default_rng(4), budget)
    assert 100 <= decision.evaluations <= 110
