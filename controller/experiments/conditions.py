"""Policies under other weights, and on a fleet whose nodes come and go."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.experiments.contenders import (
    GREEDY,
    LEARNED,
    SEARCHING,
    Contender,
    trained,
)
from controller.experiments.runs import (
    Circumstances,
    Load,
    RunFigures,
    mean_figures,
    run_all,
)
from controller.experiments.statistics import Difference, paired_difference
from controller.routing.policies import warm_up
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.simulator.churn import Churn
from controller.simulator.scenario import Scenario


class NothingLearned(ValueError):
    """There is no learned policy to look at; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Circumstances with a name for the tables."""

    name: str
    circumstances: Circumstances


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared.

    Attributes:
        name: of the experiment.
        contenders: whom; learned ones that are not trained are left out.
        conditions: under what; the first is the base.
        load: what arrives in each.
        is_against_base: whether a policy's figures are compared with its own under the base; else
            with those of `greedy-reward` under the same condition.
        compared: in which quantities.
        columns: of the table.
    """

    name: str
    contenders: tuple[Contender, ...]
    conditions: tuple[Condition, ...]
    load: Load
    is_against_base: bool
    compared: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConditionRow:
    """A policy under a condition.

    Attributes:
        condition, policy: names.
        means: as `mean_figures` has them.
        differences: by the plan's compared quantities; empty for what is compared with.
    """

    condition: str
    policy: str
    means: dict[str, float]
    differences: dict[str, Difference]


@dataclass(frozen=True, slots=True)
class ConditionResults:
    """What came of a plan: plain values on how it was made, rows, and every run."""

    plan: Plan
    made_with: dict[str, Any]
    rows: list[ConditionRow]
    runs: dict[tuple[str, str], list[RunFigures]]


def mixed_weights(energy: float = 0.0, cost: float = 0.0) -> tuple[float, float, float, float]:
    """DRLM's weights of quality and time, shrunk to make room for those of energy and money."""
    quality, _, _, late = DRLM_WEIGHTS
    left = 1.0 - energy - cost
    return (left * quality, cost, energy, left * late)


_SHARES: Final = (0.1, 0.25, 0.5)


def weights_plan(load: Load) -> Plan:
    """More and more weight on energy, then on money."""
    named = {"DRLM's weights": DRLM_WEIGHTS}
    named |= {f"energy {share:g}": mixed_weights(energy=share) for share in _SHARES}
    named |= {f"money {share:g}": mixed_weights(cost=share) for share in _SHARES}
    conditions = [Condition(name, Circumstances(weights)) for name, weights in named.items()]
    return Plan(
        "weights",
        (GREEDY, *(each for each in LEARNED if each.policy == "ppo-set"), *SEARCHING),
        tuple(conditions),
        load,
        is_against_base=True,
        compared=("energy_joules", "cost_usd", "quality", "end_to_end_seconds"),
        columns=("energy_joules", "cost_usd", "quality", "waiting_seconds", "end_to_end_seconds"),
    )


def churn_plan(load: Load, lease_seconds: float) -> Plan:
    """A fleet that stays, and two whose nodes fail and come back more and more often."""
    conditions = [Condition("all stay", Circumstances())]
    for up, down in ((600.0, 60.0), (120.0, 30.0)):
        churn = Churn(up, down, lease_seconds)
        name = f"up {up:g} s, away {down:g} s"
        conditions.append(Condition(name, Circumstances(churn=churn)))
    learned = ("ppo", "ppo-set", "ppo-set-strangers")
    return Plan(
        "churn",
        (GREEDY, *(each for each in LEARNED if each.policy in learned), *SEARCHING),
        tuple(conditions),
        load,
        is_against_base=False,
        compared=("served_ratio", "reward", "quality", "waiting_seconds", "end_to_end_seconds"),
        columns=(
            "served_ratio",
            "requeued",
            "reward",
            "quality",
            "waiting_seconds",
            "end_to_end_seconds",
            "end_to_end_p95_seconds",
            "fallback_ratio",
        ),
    )


def run_plan(
    plan: Plan,
    scenario: Scenario,
    seeds: range,
    artifacts: Path | None,
    made_with: dict[str, Any],
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> ConditionResults:
    """Every contender under every condition; equal seeds give all the same arrivals and luck.

    Raises:
        NothingLearned: the folder has none of the plan's learned policies.
    """
    contenders = trained(plan.contenders, artifacts)
    if not any(each in LEARNED for each in contenders):
        wanted = ", ".join(each.policy for each in plan.contenders if each in LEARNED)
        raise NothingLearned(
            f"{artifacts}: holds no readable {wanted}; name the --out of `edge-controller train`"
        )
    warm_up({each.policy for each in contenders if each not in LEARNED})
    runs: dict[tuple[str, str], list[RunFigures]] = {}
    total = len(plan.conditions) * len(contenders)
    for condition in plan.conditions:
        for contender in contenders:
            runs[condition.name, contender.label] = run_all(
                scenario, contender, plan.load, seeds, condition.circumstances, artifacts
            )
            progress(len(runs), total, f"{contender.label}, {condition.name}")
    rows = [
        ConditionRow(*key, mean_figures(found), _differences(plan, runs, key))
        for key, found in runs.items()
    ]
    said = {
        **made_with,
        "experiment": plan.name,
        "load": asdict(plan.load),
        "seeds": list(seeds),
        "conditions": [asdict(condition) for condition in plan.conditions],
    }
    return ConditionResults(plan, said, rows, runs)


def _differences(
    plan: Plan, runs: dict[tuple[str, str], list[RunFigures]], key: tuple[str, str]
) -> dict[str, Difference]:
    condition, policy = key
    other = (plan.conditions[0].name, policy) if plan.is_against_base else (condition, GREEDY.label)
    if other == key:
        return {}

    def values(of: tuple[str, str], metric: str) -> np.ndarray:
        return np.array([getattr(run, metric) for run in runs[of]])

    return {
        metric: paired_difference(values(key, metric), values(other, metric))
        for metric in plan.compared
    }
