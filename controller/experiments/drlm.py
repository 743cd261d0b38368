"""DRLM's comparison of routing policies, on a simulated cluster."""

import hashlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller import __version__
from controller.experiments.contenders import LEARNED_POLICIES, Contender
from controller.experiments.origin import origin_of
from controller.experiments.runs import METRICS, Circumstances, Load, RunFigures, run_all
from controller.experiments.statistics import Difference, paired_difference
from controller.routing.policies import warm_up
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.simulator.cluster import ClusterDescription
from controller.simulator.inputs import SimulationInputs, inputs_digest, load_inputs, scenario_of
from controller.simulator.runner import DEFAULT_BUDGET, outages_of
from controller.simulator.scenario import Scenario
from controller.simulator.scenario_file import read_scenario
from controller.storage.artifacts import ArtifactError
from controller.storage.policy_files import load_policy

SCHEMA: Final = "pointsman.experiment.drlm/3"

COMPARED: Final = (
    "reward",
    "unloaded_reward",
    "slowest_seconds",
    "quality",
    "inference_seconds",
    "waiting_seconds",
    "end_to_end_seconds",
    "end_to_end_p95_seconds",
    "decision_milliseconds",
)
"""That pairs of policies are compared by."""

SUBJECTS: Final = ("ppo", "ppo-set", "ppo-set-strangers")
"""Policies that all others are compared with."""


class ExperimentError(RuntimeError):
    """The experiment cannot go on; the text says what to do."""


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
    def loads(self) -> list[Load]:
        """Every number of requests at every rate."""
        return [Load(n, rate, self.arrivals) for rate in self.rates for n in self.requests]

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """A learned policy against another, in one quantity under one load."""

    policy: str
    against: str
    requests: int
    rate: float
    metric: str
    difference: Difference


@dataclass(frozen=True, slots=True)
class Target:
    """What the paper reports, or a learned policy must do to have a reason, and what was found.

    Attributes:
        claim: in words.
        wanted: bound on the relative change (`is_change`) or on the difference.
        found, low, high: with its 95 % interval.
        is_met: whether `found` keeps the bound.
        is_certain: whether the whole interval does.
    """

    claim: str
    policy: str
    against: str
    metric: str
    requests: int
    rate: float
    is_change: bool
    wanted: float
    found: float
    low: float
    high: float
    is_met: bool
    is_certain: bool


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """Where policies are compared, in a form that other processes can be told.

    Attributes:
        scenario: name or path of the cluster.
        inputs_folder: as `save_inputs` wrote it; its held-out queries arrive.
        artifacts: folder of learned policies; None: there are none.
    """

    scenario: str
    inputs_folder: Path
    artifacts: Path | None

    def open(self) -> tuple[ClusterDescription, SimulationInputs, Scenario]:
        """The cluster, all inputs, and the scenario of the held-out ones.

        Raises:
            ScenarioError, InputsError: they cannot be read or do not fit each other.
        """
        cluster = read_scenario(self.scenario)
        inputs = load_inputs(self.inputs_folder)
        return cluster, inputs, scenario_of(cluster, inputs.part(inputs.is_held_out))


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """What came of it.

    Attributes:
        made_with: setting, design, seeds, versions, machine; plain values.
        runs: figures by (label, requests, rate).
        rows: in the order of loads, then contenders.
    """

    made_with: dict[str, Any]
    runs: dict[tuple[str, int, float], list[RunFigures]]
    rows: list[Row]
    comparisons: list[Comparison]
    targets: list[Target]


def run_experiment(
    setting: Setting,
    contenders: Sequence[Contender],
    design: Design,
    kept: Path | None = None,
    jobs: int = 1,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Results:
    """Every contender under every load.

    Args:
        setting: where.
        contenders: who; learned policies must be in the setting's artifacts.
        design: under which loads.
        kept: folder of finished parts, which are not run again if nothing that matters has
            changed; None keeps none.
        jobs: processes, at least 1; 1 runs in this one.
        progress: called after each part with how many are done, of how many, and which it was.

    Raises:
        ExperimentError: a process died.
        WorkloadError: the trace cannot be replayed.
        ScenarioError, InputsError: the setting cannot be opened.
        OSError: a part cannot be kept.
    """
    started = time.perf_counter()
    cluster, inputs, _ = setting.open()
    digest = inputs_digest(inputs)
    units = [(contender, load) for load in design.loads for contender in contenders]
    keys = [_key(setting, digest, cluster, unit, design) for unit in units]
    found: dict[int, list[RunFigures]] = {}
    for at, key in enumerate(keys):
        before = _kept_part(kept, key)
        if before is not None:
            found[at] = before
    for done, at in enumerate(sorted(found), 1):
        progress(done, len(units), f"{units[at][0].label}: kept")
    left = [at for at in range(len(units)) if at not in found]
    for at, figures in _run_units(setting, [units[at] for at in left], left, design, jobs):
        found[at] = figures
        if kept is not None:
            _keep(kept, keys[at], figures)
        contender, load = units[at]
        what = f"{contender.label}, {load.requests} requests at {load.rate:g}/s"
        progress(len(found), len(units), what)
    runs = {(c.label, load.requests, load.rate): found[at] for at, (c, load) in enumerate(units)}
    rows = [
        _row(cluster, contender.label, load, runs[contender.label, load.requests, load.rate])
        for contender, load in units
    ]
    comparisons = compared(runs, contenders, design)
    return Results(
        _made_with(setting, contenders, design, cluster, inputs, started),
        runs,
        rows,
        comparisons,
        targets_of(comparisons),
    )


# -- running --------------------------------------------------------------------------------------

_Unit = tuple[Contender, Load]

# Of a worker process, which serves one experiment.
_opened: list[tuple[ClusterDescription, Scenario, Path | None]] = []


def _prepare(setting: Setting) -> None:
    cluster, _, scenario = setting.open()
    _opened[:] = [(cluster, scenario, setting.artifacts)]


def _run_unit(contender: Contender, load: Load, design: Design) -> list[RunFigures]:
    cluster, scenario, artifacts = _opened[0]
    if contender.policy not in LEARNED_POLICIES:
        warm_up([contender.policy])
    outages = tuple(outages_of(cluster.events, design.unnoticed_seconds))
    return run_all(
        scenario, contender, load, design.seeds, Circumstances(outages=outages), artifacts
    )


def _run_units(
    setting: Setting, units: Sequence[_Unit], names: Sequence[int], design: Design, jobs: int
) -> Iterator[tuple[int, list[RunFigures]]]:
    if jobs <= 1 or len(units) <= 1:
        _prepare(setting)
        for at, (contender, load) in zip(names, units, strict=True):
            yield at, _run_unit(contender, load, design)
        return
    # Not forked: threads of compiled code would not survive it.
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_prepare, initargs=(setting,)
    )
    try:
        waiting: dict[Future[list[RunFigures]], int] = {
            pool.submit(_run_unit, contender, load, design): at
            for at, (contender, load) in zip(names, units, strict=True)
        }
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BrokenProcessPool as error:
        raise ExperimentError(
            "a worker process died, perhaps for want of memory; run again with --jobs 1, finished "
            "parts are kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _key(
    setting: Setting, digest: str, cluster: ClusterDescription, unit: _Unit, design: Design
) -> str:
    """Stands for everything that a part's figures depend on, but the machine."""
    contender, load = unit
    weights = ""
    if contender.policy in LEARNED_POLICIES and setting.artifacts is not None:
        weights = load_policy(setting.artifacts / contender.policy).digest
    said = (
        SCHEMA,
        __version__,
        digest,
        repr(cluster.devices),
        repr(cluster.groups),
        repr(cluster.events),
        asdict(contender),
        asdict(load),
        [design.seed, design.runs, design.unnoticed_seconds],
        weights,
    )
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def _kept_part(folder: Path | None, key: str) -> list[RunFigures] | None:
    if folder is None:
        return None
    try:
        rows = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        return [RunFigures(**row) for row in rows]
    except (OSError, ValueError, TypeError):
        return None  # absent, torn or of another version: run again


def _keep(folder: Path, key: str, figures: Sequence[RunFigures]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{key}.partial"
    partial.write_text(json.dumps([asdict(each) for each in figures]), encoding="utf-8")
    os.replace(partial, folder / f"{key}.json")


# -- summing up -----------------------------------------------------------------------------------


def _row(cluster: ClusterDescription, label: str, load: Load, figures: Sequence[RunFigures]) -> Row:
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


def compared(
    runs: dict[tuple[str, int, float], list[RunFigures]],
    contenders: Sequence[Contender],
    design: Design,
) -> list[Comparison]:
    """Each learned contender against every other, under every load, in every compared quantity."""
    found = []
    for load in design.loads:
        for ours in (each for each in contenders if each.policy in SUBJECTS):
            for theirs in contenders:
                if theirs.label == ours.label:
                    continue
                pair = [runs[each.label, load.requests, load.rate] for each in (ours, theirs)]
                for metric in COMPARED:
                    values = [np.array([getattr(r, metric) for r in side]) for side in pair]
                    difference = paired_difference(values[0], values[1])
                    found.append(
                        Comparison(
                            ours.label,
                            theirs.label,
                            load.requests,
                            load.rate,
                            metric,
                            difference,
                        )
                    )
    return found


_OWN: Final = ("ppo", "ppo-set")
_CLAIMS: Final = (
    # claim, of whom, against, metric, rates, is a relative change, wanted
    ("waiting at least 52 % lower", _OWN, "optllm", "waiting_seconds", (2.0,), True, -0.52),
    ("waiting at least 62 % lower", _OWN, "routellm", "waiting_seconds", (2.0,), True, -0.62),
    ("inference at least 19.2 % lower", _OWN, "optllm", "inference_seconds", (2.0,), True, -0.192),
    ("inference at least 38 % lower", _OWN, "routellm", "inference_seconds", (2.0,), True, -0.38),
    ("accuracy at most 8 % lower", _OWN, "optllm", "quality", (2.0,), True, -0.08),
    ("accuracy at most 8 % lower", _OWN, "routellm", "quality", (2.0,), True, -0.08),
    ("accuracy at most 8 % lower", _OWN, "high-accuracy", "quality", (2.0,), True, -0.08),
    ("better reward", _OWN, "greedy-reward", "reward", (1.0, 2.0), False, 0.0),
    ("shorter waits", _OWN, "greedy-reward", "waiting_seconds", (1.0, 2.0), True, 0.0),
    # In absolute seconds, and on a scale that no policy can stretch.
    ("sooner answers", _OWN, "greedy-reward", "end_to_end_seconds", (1.0, 2.0), True, 0.0),
    (
        "better reward on an idle fleet's scale",
        _OWN,
        "greedy-reward",
        "unloaded_reward",
        (1.0, 2.0),
        False,
        0.0,
    ),
    (
        "reward at most 5 % lower on a fleet it has never seen",
        ("ppo-set-strangers",),
        "ppo-set",
        "reward",
        (1.0, 2.0),
        True,
        -0.05,
    ),
)
_HIGHER_IS_BETTER: Final = frozenset({"quality", "reward", "unloaded_reward"})


def targets_of(comparisons: Sequence[Comparison], requests: int = 100) -> list[Target]:
    """The paper's figures at 100 requests, and what a learned policy must do better than greedy."""
    found = []
    for claim, subjects, against, metric, rates, is_change, wanted in _CLAIMS:
        for each in (one for one in comparisons if one.policy in subjects):
            if (each.against, each.metric, each.requests) != (against, metric, requests):
                continue
            if each.rate not in rates:
                continue
            d = each.difference
            value, low, high = (
                (d.change, d.change_low, d.change_high) if is_change else (d.mean, d.low, d.high)
            )
            if metric in _HIGHER_IS_BETTER:
                is_met, is_certain = value >= wanted, low >= wanted
            else:
                is_met, is_certain = value <= wanted, high <= wanted
            found.append(
                Target(
                    claim,
                    each.policy,
                    against,
                    metric,
                    requests,
                    each.rate,
                    is_change,
                    wanted,
                    value,
                    low,
                    high,
                    is_met,
                    is_certain and not math.isnan(low),
                )
            )
    return found


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
            contender.policy: _provenance(setting.artifacts / contender.policy)
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
