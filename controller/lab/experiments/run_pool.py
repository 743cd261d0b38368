"""Runs of policies on a simulated cluster, on several processes, each kept as soon as it is done.

A part is what one contender does under one load and one set of circumstances; it has a run for each
seed. Finished runs lie in a file a part, a line each, so that a command that was stopped at any
moment goes on where it was, and one that asks for more seeds runs only these.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import controller.lab.simulator
import controller.routing
from controller import __version__
from controller.lab.experiments import contenders, runs
from controller.lab.experiments.comparison_setting import Setting
from controller.lab.experiments.contenders import LEARNED_POLICIES, Contender
from controller.lab.experiments.runs import Circumstances, RunFigures, SimulatedLoad, run_once
from controller.lab.simulator.inputs import inputs_digest
from controller.lab.simulator.scenario import Scenario
from controller.request_manager.policy_files import load_policy
from controller.routing.compiled import sources_below
from controller.routing.policies import warm_up

FOLDER: Final = "parts"
"""Of finished parts, in the folder of an experiment's results."""

Progress = Callable[[int, int, str], None]
"""Called with how many runs are done, of how many, and which was done last."""


class ExperimentError(RuntimeError):
    """The experiment cannot go on; the text says what to do."""


@dataclass(frozen=True, slots=True)
class RunPart:
    """One contender under one load and one set of circumstances."""

    contender: Contender
    load: SimulatedLoad
    circumstances: Circumstances


def run_parts(
    setting: Setting,
    parts: Sequence[RunPart],
    seeds: range,
    kept: Path | None = None,
    jobs: int = 1,
    progress: Progress = lambda done, total, what: None,
) -> list[list[RunFigures]]:
    """A run of each part for each seed, in the order of both.

    Args:
        setting: where; learned policies must be in its artifacts.
        parts: what.
        seeds: equal ones give every contender the same arrivals, queries and luck.
        kept: folder of finished runs, which are not run again if nothing that matters has changed,
            the code of policies and simulator included; None keeps none.
        jobs: processes, at least 1; 1 runs in this one.
        progress: called once with what was kept, then after each run.

    Raises:
        ExperimentError: a process died.
        WorkloadError: the trace cannot be replayed.
        ScenarioError, InputsError, ArtifactError: the setting cannot be opened.
        OSError: a run cannot be kept.
    """
    cluster, inputs, _ = setting.open()
    files: list[Path | None] = [None] * len(parts)
    if kept is not None:
        common = [__version__, _code_digest(), inputs_digest(inputs)]
        common += [repr(each) for each in (cluster.devices, cluster.groups, cluster.events)]
        files = [kept / f"{_key(common, setting, part)}.jsonl" for part in parts]
    found = [_kept_runs(file) for file in files]
    left = [(at, seed) for at in range(len(parts)) for seed in seeds if seed not in found[at]]
    total = len(parts) * len(seeds)
    done = total - len(left)
    progress(done, total, f"{done} kept")
    for at, run in _run_units(setting, parts, left, jobs):
        found[at][run.seed] = run
        file = files[at]
        if file is not None:
            _keep(file, run)
        done += 1
        progress(done, total, _said(parts[at]))
    return [[found[at][seed] for seed in seeds] for at in range(len(parts))]


def _said(part: RunPart) -> str:
    return f"{part.contender.label}, {part.load.requests} at {part.load.rate:g}/s"


# -- running --------------------------------------------------------------------------------------

# Of a worker process, which serves one experiment.
_opened: list[tuple[Scenario, Path | None]] = []


def _prepare(setting: Setting) -> None:
    _, _, scenario = setting.open()
    _opened[:] = [(scenario, setting.artifacts)]


def _run(part: RunPart, seed: int) -> RunFigures:
    scenario, artifacts = _opened[0]
    if part.contender.policy not in LEARNED_POLICIES:
        warm_up([part.contender.policy])
    return run_once(scenario, part.contender, part.load, seed, part.circumstances, artifacts)


def _run_units(
    setting: Setting,
    parts: Sequence[RunPart],
    left: Sequence[tuple[int, int]],
    jobs: int,
) -> Iterator[tuple[int, RunFigures]]:
    if jobs <= 1 or len(left) <= 1:
        if left:
            _prepare(setting)
        for at, seed in left:
            yield at, _run(parts[at], seed)
        return
    # Not forked: threads of compiled code would not survive it.
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_prepare, initargs=(setting,)
    )
    try:
        waiting: dict[Future[RunFigures], int] = {
            pool.submit(_run, parts[at], seed): at for at, seed in left
        }
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BrokenProcessPool as error:
        raise ExperimentError(
            "a worker process died, perhaps for want of memory; run again with --jobs 1, finished "
            "runs are kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# -- keeping --------------------------------------------------------------------------------------


def _key(common: Sequence[str], setting: Setting, part: RunPart) -> str:
    """Stands for everything that a part's figures depend on, but the machine and the label."""
    contender = asdict(part.contender)
    del contender["label"], contender["training_seed"]
    said: list[object] = [*common, contender, asdict(part.load), asdict(part.circumstances)]
    if part.contender.policy in LEARNED_POLICIES and setting.artifacts is not None:
        said.append(load_policy(part.contender.folder(setting.artifacts)).digest)
    if part.load.trace is not None:
        said.append(hashlib.sha256(part.load.trace.read_bytes()).hexdigest())
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def _code_digest() -> str:
    """Of the code that decides and simulates: what other code found is not gone on with."""
    files = [Path(str(module.__file__)) for module in (contenders, runs)]
    for package in (controller.routing, controller.lab.simulator):
        for folder in package.__path__:
            files += sources_below(Path(folder))
    found = hashlib.sha256()
    for file in files:
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


def _kept_runs(file: Path | None) -> dict[int, RunFigures]:
    """By seed; lines that are torn or of another version are left out, so that these run again."""
    found: dict[int, RunFigures] = {}
    try:
        lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            run = RunFigures(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[run.seed] = run
    return found


def _keep(file: Path, run: RunFigures) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        # The line before may have been cut short when a process was killed.
        lines.write(f"\n{json.dumps(asdict(run))}\n")
