"""One policy under one load: its runs, and the figures kept of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from controller.lab.experiments.contenders import Contender, policy_of
from controller.lab.simulator.churn import Churn, random_outages
from controller.lab.simulator.runner import Outage, QueryOutcome, simulate
from controller.lab.simulator.scenario import Scenario
from controller.lab.simulator.workload import (
    Trace,
    Workload,
    bursts,
    poisson,
    queries_like,
    read_trace,
    workload_of,
)
from controller.routing.ppo.observation import DRLM_WEIGHTS

LONG_WAIT_SECONDS: Final = 100.0
"""What the paper calls a long wait (its Fig. 6b)."""

QUANTILES: Final = tuple(at / 20 for at in range(21))


_PROCESSES: Final = ("poisson", "bursts")


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """What arrives in a run.

    Attributes:
        requests: how many.
        rate: a second, in the long run.
        arrivals: poisson, bursts, or the path of a trace that is pressed or stretched to the rate.
    """

    requests: int
    rate: float
    arrivals: str = "poisson"

    @property
    def trace(self) -> Path | None:
        """What is replayed, if anything."""
        return None if self.arrivals in _PROCESSES else Path(self.arrivals)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Under what a run is done, besides its load; the defaults are DRLM's.

    Attributes:
        weights: quality, cost, energy and time of the objective.
        outages: the same in every run.
        churn: further ones, drawn anew in every run, but alike for every policy.
    """

    weights: tuple[float, float, float, float] = DRLM_WEIGHTS
    outages: tuple[Outage, ...] = ()
    churn: Churn | None = None

    def outages_of(self, nodes: int, last_arrival: float, seed: int) -> list[Outage]:
        """Of the run with this seed, until well after its last arrival."""
        found = list(self.outages)
        if self.churn is not None:
            rng = np.random.default_rng((seed, 2))
            found += random_outages(nodes, self.churn, last_arrival + _AFTER_SECONDS, rng)
        return found


_AFTER_SECONDS: Final = 600.0
"""How long after the last arrival nodes still come and go; requests have long ended by then."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one run came to; means over its served requests unless it says otherwise.

    Attributes:
        seed: of its arrivals, queries and luck.
        reward: DRLM's, as seen when decided.
        unloaded_reward: the same on the scale of an idle fleet, which no policy can stretch.
        slowest_seconds: predicted, of the slowest candidate when decided.
        quality: score of the answers.
        inference_seconds, waiting_seconds, end_to_end_seconds: of the simulation.
        waiting_p95_seconds, end_to_end_p95_seconds: 95th percentiles.
        long_wait_ratio: share that waited longer than `LONG_WAIT_SECONDS`.
        decision_milliseconds: median over requests, of the machine's clock.
        energy_joules, cost_usd: of service, per request.
        idle_joules: of nodes with nothing to do, per request.
        utilisation: mean over nodes.
        fallback_ratio: share of decisions that the policy left to another.
        served_ratio: share of the requests that were answered.
        failed, requeued: requests that failed with their node, and dispatches that started again.
        waiting_quantiles: seconds, at `QUANTILES`.
        model_counts: requests by configuration.
        kind_counts: requests by group of nodes.
    """

    seed: int
    reward: float
    unloaded_reward: float
    slowest_seconds: float
    quality: float
    inference_seconds: float
    waiting_seconds: float
    waiting_p95_seconds: float
    long_wait_ratio: float
    end_to_end_seconds: float
    end_to_end_p95_seconds: float
    decision_milliseconds: float
    energy_joules: float
    idle_joules: float
    cost_usd: float
    utilisation: float
    fallback_ratio: float
    served_ratio: float
    failed: int
    requeued: int
    waiting_quantiles: list[float]
    model_counts: list[int]
    kind_counts: list[int]


METRICS: Final = (
    "reward",
    "unloaded_reward",
    "slowest_seconds",
    "quality",
    "inference_seconds",
    "waiting_seconds",
    "waiting_p95_seconds",
    "long_wait_ratio",
    "end_to_end_seconds",
    "end_to_end_p95_seconds",
    "decision_milliseconds",
    "energy_joules",
    "idle_joules",
    "cost_usd",
    "utilisation",
    "fallback_ratio",
    "served_ratio",
)
"""Of a run, that means and deviations are taken of."""


def mean_figures(runs: Sequence[RunFigures]) -> dict[str, float]:
    """By the names in `METRICS`, over the runs, and counts of what nodes that failed cost."""
    found = {name: float(np.mean([getattr(run, name) for run in runs])) for name in METRICS}
    found["failed"] = float(np.mean([run.failed for run in runs]))
    found["requeued"] = float(np.mean([run.requeued for run in runs]))
    return found


def workload_for(load: SimulatedLoad, scenario: Scenario, seed: int) -> Workload:
    """The requests of a run.

    A trace is replayed from anywhere in it, and each of its requests asks a query of like length.

    Raises:
        WorkloadError: the trace cannot be replayed.
    """
    rng = np.random.default_rng((seed, load.requests, 0))
    other = np.random.default_rng((seed, load.requests, 1))
    query = None
    if load.arrivals == "poisson":
        times = poisson(load.requests, load.rate, rng)
    elif load.arrivals == "bursts":
        times = bursts(load.requests, load.rate, rng)
    else:
        part = _trace(load.arrivals).part(load.requests, load.rate, rng)
        times = part.seconds
        if scenario.prompt_tokens is not None and scenario.answer_tokens is not None:
            query = queries_like(part, scenario.prompt_tokens, scenario.answer_tokens, rng)
    return workload_of(times, scenario.queries, other, query)


@lru_cache(maxsize=1)
def _trace(path: str) -> Trace:
    return read_trace(Path(path))


def run_all(
    scenario: Scenario,
    contender: Contender,
    load: SimulatedLoad,
    seeds: range,
    circumstances: Circumstances | None = None,
    artifacts: Path | None = None,
) -> list[RunFigures]:
    """A run for each seed; raises what `run_once` does."""
    given = circumstances or Circumstances()
    return [run_once(scenario, contender, load, seed, given, artifacts) for seed in seeds]


def run_once(
    scenario: Scenario,
    contender: Contender,
    load: SimulatedLoad,
    seed: int,
    circumstances: Circumstances,
    artifacts: Path | None = None,
) -> RunFigures:
    """One run, with a policy that remembers nothing of others.

    Args:
        scenario: where.
        contender: who.
        load: what arrives.
        seed: equal seeds give every contender the same arrivals, queries and luck.
        circumstances: under what else.
        artifacts: folder of learned policies.

    Raises:
        WorkloadError: the trace cannot be replayed.
        UnknownPolicy: the contender's policy does not exist.
    """
    workload = workload_for(load, scenario, seed)
    last_arrival = float(workload.arrivals[-1])
    outcome = simulate(
        scenario,
        workload,
        policy_of(contender, artifacts),
        np.array(circumstances.weights),
        seed=seed,
        window=contender.window,
        outages=circumstances.outages_of(scenario.nodes, last_arrival, seed),
    )
    return figures_of(outcome, scenario, seed)


def figures_of(outcome: QueryOutcome, scenario: Scenario, seed: int) -> RunFigures:
    """What is kept of a run; NaN where nothing was served."""
    served = outcome.served
    count = served.size

    def mean(values: np.ndarray) -> float:
        return float(values[served].mean()) if served.any() else float("nan")

    def quantiles(values: np.ndarray, at: tuple[float, ...]) -> list[float]:
        if not served.any():
            return [float("nan")] * len(at)
        return [float(value) for value in np.quantile(values[served], at)]

    sent = outcome.destination[served]
    kinds = scenario.seconds.shape[2]
    waited = outcome.waiting_seconds
    return RunFigures(
        seed=seed,
        reward=mean(outcome.reward),
        unloaded_reward=mean(outcome.unloaded_reward),
        slowest_seconds=mean(outcome.slowest_seconds),
        quality=mean(outcome.correct),
        inference_seconds=mean(outcome.inference_seconds),
        waiting_seconds=mean(waited),
        waiting_p95_seconds=quantiles(waited, (0.95,))[0],
        long_wait_ratio=mean((waited > LONG_WAIT_SECONDS).astype(np.float64)),
        end_to_end_seconds=mean(outcome.end_to_end_seconds),
        end_to_end_p95_seconds=quantiles(outcome.end_to_end_seconds, (0.95,))[0],
        decision_milliseconds=float(np.median(outcome.decision_seconds) * 1e3),
        energy_joules=outcome.energy_joules / count,
        idle_joules=outcome.idle_joules / count,
        cost_usd=outcome.cost_usd / count,
        utilisation=float(outcome.utilisation.mean()),
        fallback_ratio=outcome.fallbacks / max(outcome.decisions, 1),
        served_ratio=float(served.mean()),
        failed=int(outcome.failed.sum()),
        requeued=outcome.requeued,
        waiting_quantiles=quantiles(waited, QUANTILES),
        model_counts=np.bincount(
            scenario.model_of[sent], minlength=scenario.parameters_billions.size
        ).tolist(),
        kind_counts=np.bincount(
            scenario.kind_of_node[scenario.node_of[sent]], minlength=kinds
        ).tolist(),
    )
