"""DRLM's comparison of routing policies, on the simulated cluster."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller import __version__
from controller.routing.policies import policy_named, warm_up
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.routing.ppo.policy import LearnedPolicy
from controller.routing.problem import name_key
from controller.simulator.runner import DEFAULT_BUDGET, Outcome, Window, simulate
from controller.simulator.scenario import Scenario
from controller.simulator.workload import bursts, poisson, replay, workload_of
from controller.training.vector_environment import World
from controller.training.worlds import paper_world

SCHEMA: Final = "pointsman.experiment.drlm/1"

BATCH_WINDOW: Final = Window(seconds=2.0, most=30)
"""For the policies that decide on batches."""

EACH: Final = Window()
"""For the policies that decide on each arrival."""

_FAMILIES: Final = (
    "gpt-oss",
    "gemma2",
    "gemma3",
    "llama3.1",
    "llama3.2",
    "qwen3",
    "tinyllama",
    "mistral",
)
_BITS: Final = (2, 3, 4, 8, 16)
_KINDS: Final = ("Raspberry Pi", "Jetson Nano", "Orin Nano", "Orin AGX", "virtual machine")


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy and how arrivals are handed to it.

    Attributes:
        label: its name in the tables.
        policy: as `policy_named` knows it.
        window: how arrivals are gathered.
    """

    label: str
    policy: str
    window: Window = EACH


BASELINES: Final = tuple(
    Contender(name, name)
    for name in ("random", "high-accuracy", "fastest", "routellm", "optllm", "greedy-reward")
)
LEARNED: Final = (Contender("ppo", "ppo"), Contender("ppo-set", "ppo-set"))
SEARCHING: Final = (
    Contender("memetic (each)", "memetic"),
    Contender("memetic (window)", "memetic", BATCH_WINDOW),
    Contender("cema (window)", "cema", BATCH_WINDOW),
)


@dataclass(frozen=True, slots=True)
class Design:
    """What is run.

    Attributes:
        requests: numbers of requests of a run.
        rates: arrivals a second.
        runs: repetitions of each, with seeds `seed`, `seed` + 1, ...
        seed: the first.
        arrivals: poisson, bursts, or the path of a trace that is replayed at the rate.
    """

    requests: tuple[int, ...] = (25, 50, 100)
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    runs: int = 10
    seed: int = 0
    arrivals: str = "poisson"


QUICK: Final = Design(requests=(25,), rates=(1.0,), runs=2)
"""For a first look, in under a minute."""


@dataclass(frozen=True, slots=True)
class Row:
    """A policy under one number of requests and rate: means over runs of means over requests.

    Attributes:
        policy: label.
        requests: of a run.
        rate: arrivals a second.
        runs: repetitions.
        reward: DRLM's, as predicted when decided.
        reward_std: over runs, as the other `_std`.
        quality: score of the answers.
        inference_seconds, waiting_seconds, end_to_end_seconds: of served requests.
        end_to_end_p95_seconds: mean over runs of the 95th percentile.
        decision_milliseconds: median over all requests, of this machine's clock.
        energy_joules, cost_usd: per request.
        utilisation: mean over nodes.
        fallback_ratio: share of decisions that the policy left to another.
        unserved: requests of all runs that never were.
        model_shares: share of the requests by model; those below 0.005 are left out.
        kind_shares: share by kind of node.
    """

    policy: str
    requests: int
    rate: float
    runs: int
    reward: float
    reward_std: float
    quality: float
    quality_std: float
    inference_seconds: float
    inference_seconds_std: float
    waiting_seconds: float
    waiting_seconds_std: float
    end_to_end_seconds: float
    end_to_end_seconds_std: float
    end_to_end_p95_seconds: float
    decision_milliseconds: float
    energy_joules: float
    cost_usd: float
    utilisation: float
    fallback_ratio: float
    unserved: int
    model_shares: dict[str, float]
    kind_shares: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """How models and kinds of nodes are called in the results."""

    models: tuple[str, ...]
    kinds: tuple[str, ...]


def scenario_of(world: World) -> Scenario:
    """The simulator's form of a fleet to train on; destinations node after node."""
    layout = world.layout
    node_of, model_of = np.nonzero(layout.deployed.T)
    kind = layout.kind_of_node
    return Scenario(
        node_of=node_of,
        model_of=model_of,
        kind_of_node=kind,
        node_keys=layout.node_keys,
        model_keys=layout.model_keys,
        parameters_billions=world.parameters_billions,
        slots=world.slots[kind],
        watts=world.watts[kind],
        usd_per_second=world.usd_per_second[kind],
        quality=world.quality,
        correct=world.correct,
        seconds=world.seconds,
        noise=world.noise,
    )


def paper_scenario() -> Scenario:
    """DRLM's cluster with the fifth of the queries that `edge-controller train` leaves out."""
    return scenario_of(paper_world(0).split(0.2, 0)[1])


def numbered_names(scenario: Scenario) -> Names:
    """Models by size in billions and index, kinds by index."""
    models = tuple(f"{size:g}b #{m}" for m, size in enumerate(scenario.parameters_billions))
    return Names(models, tuple(f"kind {k}" for k in range(scenario.seconds.shape[2])))


def paper_names() -> Names:
    """The names of DRLM's Table I; a model is found by the key of its name."""
    world = paper_world(0, 1)
    known = {
        name_key(name): name
        for family in _FAMILIES
        for size in dict.fromkeys(world.parameters_billions.tolist())
        for bits in _BITS
        for name in (f"{family}-{size:g}b-q{bits}",)
    }
    return Names(tuple(known[int(key)] for key in world.layout.model_keys), _KINDS)


def compare(
    scenario: Scenario,
    contenders: Sequence[Contender],
    design: Design,
    names: Names | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Every contender under every load; equal seeds give all the same arrivals and luck.

    Raises:
        WorkloadError: the trace cannot be replayed.
        UnknownPolicy: a contender's policy does not exist.
    """
    names = names or numbered_names(scenario)
    warm_up(dict.fromkeys(contender.policy for contender in contenders))
    rows = []
    for rate in design.rates:
        for requests in design.requests:
            for contender in contenders:
                policy = policy_named(contender.policy)
                outcomes = [
                    simulate(
                        scenario,
                        workload_of(
                            arrival_times(design.arrivals, requests, rate, seed),
                            scenario.queries,
                            np.random.default_rng((seed, requests, 1)),
                        ),
                        policy,
                        np.array(DRLM_WEIGHTS),
                        seed=seed,
                        window=contender.window,
                    )
                    for seed in range(design.seed, design.seed + design.runs)
                ]
                rows.append(summary(contender.label, requests, rate, outcomes, scenario, names))
            progress(f"{requests} requests at {rate:g}/s: {len(contenders)} policies done")
    return rows


def arrival_times(kind: str, requests: int, rate: float, seed: int) -> np.ndarray:
    """Arrival times of a run; `kind` as in `Design.arrivals`, float64[requests].

    Raises:
        WorkloadError: the trace cannot be replayed.
    """
    rng = np.random.default_rng((seed, requests, 0))
    if kind == "poisson":
        return poisson(requests, rate, rng)
    if kind == "bursts":
        return bursts(requests, rate, rng)
    return replay(Path(kind), requests, rate)


def summary(
    label: str,
    requests: int,
    rate: float,
    outcomes: Sequence[Outcome],
    scenario: Scenario,
    names: Names,
) -> Row:
    """The row of a policy from its runs; NaN where a run served nothing."""

    def over_runs(values: Callable[[Outcome], np.ndarray]) -> tuple[float, float]:
        means = [
            float(values(outcome)[outcome.served].mean()) if outcome.served.any() else np.nan
            for outcome in outcomes
        ]
        return float(np.mean(means)), float(np.std(means))

    reward, reward_std = over_runs(lambda o: o.reward)
    quality, quality_std = over_runs(lambda o: o.correct)
    inference, inference_std = over_runs(lambda o: o.inference_seconds)
    waiting, waiting_std = over_runs(lambda o: o.waiting_seconds)
    whole, whole_std = over_runs(lambda o: o.end_to_end_seconds)
    tails = [
        float(np.quantile(o.end_to_end_seconds[o.served], 0.95)) if o.served.any() else np.nan
        for o in outcomes
    ]
    total = requests * len(outcomes)
    sent = np.concatenate([o.destination[o.served] for o in outcomes])
    model_count = np.bincount(scenario.model_of[sent], minlength=len(names.models))
    kind_count = np.bincount(
        scenario.kind_of_node[scenario.node_of[sent]], minlength=len(names.kinds)
    )
    return Row(
        policy=label,
        requests=requests,
        rate=rate,
        runs=len(outcomes),
        reward=reward,
        reward_std=reward_std,
        quality=quality,
        quality_std=quality_std,
        inference_seconds=inference,
        inference_seconds_std=inference_std,
        waiting_seconds=waiting,
        waiting_seconds_std=waiting_std,
        end_to_end_seconds=whole,
        end_to_end_seconds_std=whole_std,
        end_to_end_p95_seconds=float(np.mean(tails)),
        decision_milliseconds=float(
            np.median(np.concatenate([o.decision_seconds for o in outcomes])) * 1e3
        ),
        energy_joules=sum(o.energy_joules for o in outcomes) / total,
        cost_usd=sum(o.cost_usd for o in outcomes) / total,
        utilisation=float(np.mean([o.utilisation.mean() for o in outcomes])),
        fallback_ratio=sum(o.fallbacks for o in outcomes) / sum(o.decisions for o in outcomes),
        unserved=int(sum((~o.served).sum() for o in outcomes)),
        model_shares={
            name: round(count / total, 4)
            for name, count in zip(names.models, model_count.tolist(), strict=True)
            if count / total >= 0.005
        },
        kind_shares={
            name: round(count / total, 4)
            for name, count in zip(names.kinds, kind_count.tolist(), strict=True)
            if count
        },
    )


def trained_contenders() -> tuple[Contender, ...]:
    """The learned policies that the artifacts in use hold."""
    found = []
    for contender in LEARNED:
        policy = policy_named(contender.policy)
        if isinstance(policy, LearnedPolicy) and policy.is_trained:
            found.append(contender)
    return tuple(found)


def provenance(design: Design, contenders: Sequence[Contender], seconds: float) -> dict[str, Any]:
    """What the results were made with; plain values."""
    return {
        "schema": SCHEMA,
        "versions": {
            "pointsman": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": metadata.version("numba"),
        },
        "machine": {"system": platform.system(), "architecture": platform.machine()},
        "scenario": "paper_world(0), held-out fifth of the queries",
        "requests": list(design.requests),
        "rates": list(design.rates),
        "seeds": list(range(design.seed, design.seed + design.runs)),
        "arrivals": Path(design.arrivals).name,
        "weights": list(DRLM_WEIGHTS),
        "max_evaluations": DEFAULT_BUDGET.max_evaluations,
        "contenders": [
            {
                "label": c.label,
                "policy": c.policy,
                "window_seconds": c.window.seconds,
                "window_most": c.window.most,
            }
            for c in contenders
        ],
        "wall_seconds": round(seconds, 2),
    }
