"""Policies under other weights, and on a fleet whose nodes come and go."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.lab.experiments.claims import paper_claims
from controller.lab.experiments.comparison_setting import Setting
from controller.lab.experiments.contenders import (
    GREEDY,
    LEARNED,
    PAPER,
    SEARCHING,
    SPREAD,
    Contender,
    trained,
)
from controller.lab.experiments.frontier import Bound, quality_bounds
from controller.lab.experiments.provenance import origin_of
from controller.lab.experiments.run_pool import Progress, RunPart, run_parts
from controller.lab.experiments.runs import Circumstances, RunFigures, SimulatedLoad, mean_figures
from controller.lab.experiments.statistics import Difference, paired_difference
from controller.lab.simulator.churn import Churn
from controller.lab.simulator.scenario import Scenario
from controller.routing.ppo.observation import DRLM_WEIGHTS


class NothingLearned(ValueError):
    """There is no learned policy to look at; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Circumstances with a name for the tables."""

    name: str
    circumstances: Circumstances


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """What is compared.

    Where conditions differ in weights alone, a policy that heeds none is run under the base only.

    Attributes:
        name: of the experiment.
        contenders: whom; learned ones that are not trained are left out.
        conditions: under what; the first is the base.
        load: what arrives in each.
        against: labels of those whom all are compared with under the same condition, or the base
            if these are not run there; without any, a policy is compared with itself under the
            base.
        compared: in which quantities.
        columns: of the table.
        bound_by: policies whose inference, as much shorter as DRLM's paper claims, limits what
            quality can be had at best.
    """

    name: str
    contenders: tuple[Contender, ...]
    conditions: tuple[Condition, ...]
    load: SimulatedLoad
    against: tuple[str, ...]
    compared: tuple[str, ...]
    columns: tuple[str, ...]
    bound_by: tuple[str, ...] = ()

    @property
    def varies_weights(self) -> bool:
        """Whether the conditions differ in weights alone."""
        return all(
            replace(each.circumstances, weights=DRLM_WEIGHTS) == Circumstances()
            for each in self.conditions
        )

    def takes_part(self, contender: Contender, condition: Condition) -> bool:
        """Whether the contender is run under the condition."""
        is_base = condition == self.conditions[0]
        return is_base or contender.heeds_weights or not self.varies_weights


@dataclass(frozen=True, slots=True)
class ConditionRow:
    """A policy under a condition.

    Attributes:
        condition, policy: names.
        means: as `mean_figures` has them.
        differences: by whom it is compared with, then by the plan's compared quantities; a policy
            is not compared with itself under the same condition.
    """

    condition: str
    policy: str
    means: dict[str, float]
    differences: dict[str, dict[str, Difference]]


@dataclass(frozen=True, slots=True)
class ConditionResults:
    """What came of a plan.

    Attributes:
        plan: which.
        made_with: setting, seeds, versions, machine; plain values.
        rows: by condition, then contender.
        runs: figures by (condition, label).
        bounds: what quality can be had at best, each with a word on what limits it.
    """

    plan: ExperimentPlan
    made_with: dict[str, Any]
    rows: list[ConditionRow]
    runs: dict[tuple[str, str], list[RunFigures]]
    bounds: list[tuple[str, Bound]]


def mixed_weights(energy: float = 0.0, cost: float = 0.0) -> tuple[float, float, float, float]:
    """DRLM's weights of quality and time, shrunk to make room for those of energy and money."""
    quality, _, _, late = DRLM_WEIGHTS
    left = 1.0 - energy - cost
    return (left * quality, cost, energy, left * late)


_SHARES: Final = (0.1, 0.25, 0.5)
_TIME_SHARES: Final = (0.35, 0.5, 0.7, 0.9, 0.95, 0.97, 0.98)

RIVALS: Final = ("optllm", "routellm")
"""Whom DRLM's paper claims shorter inference and waits than."""


def weights_plan(load: SimulatedLoad) -> ExperimentPlan:
    """More and more weight on energy, then on money."""
    named = {"DRLM's weights": DRLM_WEIGHTS}
    named |= {f"energy {share:g}": mixed_weights(energy=share) for share in _SHARES}
    named |= {f"money {share:g}": mixed_weights(cost=share) for share in _SHARES}
    conditions = [Condition(name, Circumstances(weights)) for name, weights in named.items()]
    return ExperimentPlan(
        "weights",
        (GREEDY, *(each for each in LEARNED if each.policy == "ppo-set"), *SEARCHING),
        tuple(conditions),
        load,
        against=(),
        compared=("energy_joules", "cost_usd", "quality", "end_to_end_seconds"),
        columns=("energy_joules", "cost_usd", "quality", "waiting_seconds", "end_to_end_seconds"),
    )


def churn_plan(load: SimulatedLoad, lease_seconds: float) -> ExperimentPlan:
    """A fleet that stays, and two whose nodes fail and come back more and more often."""
    conditions = [Condition("all stay", Circumstances())]
    for up, down in ((600.0, 60.0), (120.0, 30.0)):
        churn = Churn(up, down, lease_seconds)
        name = f"up {up:g} s, away {down:g} s"
        conditions.append(Condition(name, Circumstances(churn=churn)))
    learned = ("ppo", "ppo-set", "ppo-set-strangers")
    return ExperimentPlan(
        "churn",
        (GREEDY, *(each for each in LEARNED if each.policy in learned), *SEARCHING),
        tuple(conditions),
        load,
        against=(GREEDY.label,),
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


def seconds_plan(load: SimulatedLoad) -> ExperimentPlan:
    """More and more weight on time in place of quality, beside the policies of DRLM's paper."""
    named = {"DRLM's weights": DRLM_WEIGHTS}
    named |= {f"time {share:g}": (1.0 - share, 0.0, 0.0, share) for share in _TIME_SHARES}
    learned = ("ppo-set", "ppo-set-strangers")
    return ExperimentPlan(
        "seconds",
        (
            *(each for each in PAPER if each.label in ("high-accuracy", *RIVALS)),
            GREEDY,
            *(each for each in LEARNED if each.policy in learned),
            *SPREAD,
            *SEARCHING,
        ),
        tuple(Condition(name, Circumstances(weights)) for name, weights in named.items()),
        load,
        against=RIVALS,
        compared=("quality", "inference_seconds", "waiting_seconds", "end_to_end_seconds"),
        columns=("quality", "inference_seconds", "waiting_seconds", "end_to_end_seconds"),
        bound_by=RIVALS,
    )


def run_plan(
    plan: ExperimentPlan,
    setting: Setting,
    seeds: range,
    kept: Path | None = None,
    jobs: int = 1,
    progress: Progress = lambda done, total, what: None,
) -> ConditionResults:
    """Every contender under every condition; arguments and errors beyond these are `run_parts`'s.

    Args:
        plan: what.
        setting: where.
        seeds: of the runs.

    Raises:
        NothingLearned: the folder has none of the plan's learned policies.
    """
    contenders = trained(plan.contenders, setting.artifacts)
    if not any(each in LEARNED for each in contenders):
        wanted = ", ".join(each.policy for each in plan.contenders if each in LEARNED)
        raise NothingLearned(
            f"{setting.artifacts}: holds no readable {wanted}; name the --out of "
            "`edge-controller lab train`"
        )
    keys = [
        (condition, each)
        for condition in plan.conditions
        for each in contenders
        if plan.takes_part(each, condition)
    ]
    parts = [RunPart(each, plan.load, condition.circumstances) for condition, each in keys]
    found = run_parts(setting, parts, seeds, kept, jobs, progress)
    runs = {
        (condition.name, each.label): figures
        for (condition, each), figures in zip(keys, found, strict=True)
    }
    rows = [
        ConditionRow(*key, mean_figures(figures), _differences(plan, runs, key))
        for key, figures in runs.items()
    ]
    cluster, inputs, scenario = setting.open()
    said = {
        **origin_of(cluster, inputs),
        "experiment": plan.name,
        "load": asdict(plan.load),
        "seeds": list(seeds),
        "conditions": [asdict(condition) for condition in plan.conditions],
    }
    return ConditionResults(plan, said, rows, runs, _bounds(plan, rows, scenario))


def _bounds(
    plan: ExperimentPlan, rows: Sequence[ConditionRow], scenario: Scenario
) -> list[tuple[str, Bound]]:
    """Of the best choice without a limit, of each rival's inference, and of less as claimed."""
    took = {row.policy: row.means["inference_seconds"] for row in rows}
    limits = {"no limit": np.inf}
    for claim in paper_claims():
        if claim.metric == "inference_seconds" and claim.against in plan.bound_by:
            seconds = took[claim.against]
            limits[f"{claim.against}'s"] = seconds
            limits[f"{-100 * claim.wanted:g} % less than {claim.against}'s"] = seconds * (
                1.0 + claim.wanted
            )
    if not plan.bound_by:
        return []
    return list(zip(limits, quality_bounds(scenario, list(limits.values())), strict=True))


def _differences(
    plan: ExperimentPlan, runs: dict[tuple[str, str], list[RunFigures]], key: tuple[str, str]
) -> dict[str, dict[str, Difference]]:
    condition, policy = key
    base = plan.conditions[0].name
    others = {
        label: (condition if (condition, label) in runs else base, label) for label in plan.against
    }
    if not others:
        others = {policy: (base, policy)}

    def values(of: tuple[str, str], metric: str) -> np.ndarray:
        return np.array([getattr(run, metric) for run in runs[of]])

    return {
        label: {
            metric: paired_difference(values(key, metric), values(other, metric))
            for metric in plan.compared
        }
        for label, other in others.items()
        if other != key
    }
