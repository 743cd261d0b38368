"""DRLM's comparison of routing policies, on a simulated cluster."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.lab.experiments.claims import ClaimTarget, targets_of
from controller.lab.experiments.comparison_setting import Setting
from controller.lab.experiments.comparisons import Comparison, compared
from controller.lab.experiments.contenders import LEARNED_POLICIES, Contender
from controller.lab.experiments.provenance import origin_of
from controller.lab.experiments.run_pool import Progress, RunPart, run_parts
from controller.lab.experiments.runs import METRICS, Circumstances, RunFigures, SimulatedLoad
from controller.lab.experiments.training_spread import Spread, spreads
from controller.lab.simulator.cluster import ClusterDescription
from controller.lab.simulator.inputs import SimulationInputs
from controller.lab.simulator.runner import DEFAULT_BUDGET, outages_of
from controller.request_manager.policy_files import load_policy
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.storage.artifacts import ArtifactError

SCHEMA: Final = "pointsman.experiment.drlm/4"


@dataclass(frozen=True, slots=True)
class Design:
    """What is run; the defaults are DRLM's.

    Attributes:
        requests: numbers of requests of a run.
        rates: arrivals a second.
        runs: repetitions of each, with seeds `seed`, `seed` + 1, ...
        seed: the first.
        arrivals: poisson, bursts, or the path of a trace that is replayed at the rate.
        unnoticed_seconds: how long a failed node of the scenario goes on being sent requests.
    """

    requests: tuple[int, ...] = (25, 50, 100)
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    runs: int = 10
    seed: int = 0
    arrivals: str = "poisson"
    unnoticed_seconds: float = 0.0

    @property
    def loads(self) -> list[SimulatedLoad]:
        """Every number of requests at every rate."""
        return [SimulatedLoad(n, rate, self.arrivals) for rate in self.rates for n in self.requests]

    @property
    def seeds(self) -> range:
        """Of the runs."""
        return range(self.seed, self.seed + self.runs)


QUICK: Final = Design(requests=(25, 100), rates=(2.0,), runs=2)
"""For a first look, in under a minute."""


@dataclass(frozen=True, slots=True)
class Row:
    """A policy under one load.

    Attributes:
        policy: label.
        requests, rate: the load.
        runs: repetitions.
        means: by the names in `METRICS`, over the runs.
        deviations: likewise; sample standard deviations, 0 of a single run.
        failed: requests of all runs that failed or were never served.
        model_shares, group_shares, class_shares: share of the served requests by configuration,
            group of nodes and device class; those of 0 are left out.
        waiting_quantiles: seconds at `QUANTILES`, mean over the runs.
    """

    policy: str
    requests: int
    rate: float
    runs: int
    means: dict[str, float]
    deviations: dict[str, float]
    failed: int
    model_shares: dict[str, float]
    group_shares: dict[str, float]
    class_shares: dict[str, float]
    waiting_quantiles: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """What came of it.

    Attributes:
        made_with: setting, design, seeds, versions, machine; plain values.
        runs: figures by (label, requests, rate).
        rows: in the order of loads, then contenders.
        trainings: what hangs on the training, where policies were trained more than once.
    """

    made_with: dict[str, Any]
    runs: dict[tuple[str, int, float], list[RunFigures]]
    rows: list[Row]
    comparisons: list[Comparison]
    targets: list[ClaimTarget]
    trainings: list[Spread]


def run_experiment(
    setting: Setting,
    contenders: Sequence[Contender],
    design: Design,
    kept: Path | None = None,
    jobs: int = 1,
    progress: Progress = lambda done, total, what: None,
) -> Results:
    """Every contender under every load; arguments and errors beyond these are `run_parts`'s.

    Args:
        setting: where.
        contenders: who.
        design: under which loads.
    """
    started = time.perf_counter()
    cluster, inputs, _ = setting.open()
    outages = tuple(outages_of(cluster.events, design.unnoticed_seconds))
    parts = [
        RunPart(contender, load, Circumstances(outages=outages))
        for load in design.loads
        for contender in contenders
    ]
    found = run_parts(setting, parts, design.seeds, kept, jobs, progress)
    runs = {
        (part.contender.label, part.load.requests, part.load.rate): figures
        for part, figures in zip(parts, found, strict=True)
    }
    comparisons = compared(runs, contenders, design.loads)
    return Results(
        _made_with(setting, contenders, design, cluster, inputs, started),
        runs,
        [
            _row(cluster, part.contender.label, part.load, figures)
            for part, figures in zip(parts, found, strict=True)
        ],
        comparisons,
        targets_of(comparisons),
        spreads(comparisons, contenders),
    )


# -- summing up -----------------------------------------------------------------------------------


def _row(
    cluster: ClusterDescription, label: str, load: SimulatedLoad, figures: Sequence[RunFigures]
) -> Row:
    table = {name: np.array([getattr(run, name) for run in figures]) for name in METRICS}
    groups = [group.name for group in cluster.groups]
    classes = [cluster.devices[group.device].kind for group in cluster.groups]
    by_group = np.sum([run.kind_counts for run in figures], axis=0)
    by_class: dict[str, float] = {}
    for name, share in zip(classes, by_group, strict=True):
        by_class[name] = by_class.get(name, 0.0) + float(share)
    return Row(
        policy=label,
        requests=load.requests,
        rate=load.rate,
        runs=len(figures),
        means={name: float(values.mean()) for name, values in table.items()},
        deviations={
            name: float(values.std(ddof=1)) if values.size > 1 else 0.0
            for name, values in table.items()
        },
        failed=sum(load.requests - round(run.served_ratio * load.requests) for run in figures),
        model_shares=_shares(
            [model.name for model in cluster.configurations],
            np.sum([run.model_counts for run in figures], axis=0),
        ),
        group_shares=_shares(groups, by_group),
        class_shares=_shares(list(by_class), np.array(list(by_class.values()))),
        waiting_quantiles=np.mean([run.waiting_quantiles for run in figures], axis=0).tolist(),
    )


def _shares(names: Sequence[str], counts: np.ndarray) -> dict[str, float]:
    total = max(float(counts.sum()), 1.0)
    return {
        name: round(float(count) / total, 5)
        for name, count in zip(names, counts, strict=True)
        if count > 0
    }


def _made_with(
    setting: Setting,
    contenders: Sequence[Contender],
    design: Design,
    cluster: ClusterDescription,
    inputs: SimulationInputs,
    started: float,
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        **origin_of(cluster, inputs),
        "design": {
            **asdict(design),
            "arrivals": Path(design.arrivals).name,
            "seeds": list(design.seeds),
        },
        "weights": list(DRLM_WEIGHTS),
        "max_evaluations": DEFAULT_BUDGET.max_evaluations,
        "contenders": [asdict(contender) for contender in contenders],
        "policies": {
            contender.label: _provenance(contender.folder(setting.artifacts))
            for contender in contenders
            if contender.policy in LEARNED_POLICIES and setting.artifacts is not None
        },
        "wall_seconds": round(time.perf_counter() - started, 2),
    }


def _provenance(folder: Path) -> dict[str, Any]:
    try:
        return dict(load_policy(folder).provenance)
    except ArtifactError as error:
        return {"error": str(error)}
