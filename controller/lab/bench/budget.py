"""Whether the search that serves keeps to its time budget while the machine does other work."""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from controller.lab.bench.sample import QueueModel, sample_problem
from controller.request_manager.decider import GIL_SWITCH_SECONDS
from controller.routing.decision_memory import DecisionMemory
from controller.routing.evaluator import evaluate
from controller.routing.memetic.algorithm import MemeticPolicy
from controller.routing.objective import bounds_of, objectives
from controller.routing.policies import warm_up
from controller.routing.policy import Budget
from controller.routing.problem import RoutingProblem


@dataclass(frozen=True, slots=True)
class Case:
    """R requests on D = nodes x models destinations, decided within a budget."""

    requests: int
    nodes: int
    models_per_node: int
    queue: QueueModel
    budget_seconds: float


CASES: Final = (
    Case(30, 44, 2, QueueModel.SERIAL, 0.01),
    Case(30, 44, 2, QueueModel.BATCHED, 0.01),
    Case(128, 44, 2, QueueModel.SERIAL, 0.05),
    Case(128, 44, 2, QueueModel.BATCHED, 0.05),
)


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One case under one load.

    Attributes:
        load: "idle"; "thread", a Python thread of the same process that never rests; "process",
            a process of its own; "processes", as many as there are cores.
        over_milliseconds_p95: by which decisions end after the budget; negative when before.
        gap_percent: median of J above the least that any decision of the problem found.
    """

    size: str
    queue: str
    load: str
    budget_milliseconds: float
    decisions: int
    decision_milliseconds_p50: float
    decision_milliseconds_p95: float
    over_milliseconds_p95: float
    gap_percent: float


def bench_budget(
    cases: tuple[Case, ...] = CASES,
    decisions: int = 200,
    progress: Callable[[str], None] = lambda line: None,
) -> list[BudgetRow]:
    """Measure decision times under every load, in one run.

    Args:
        cases: what is decided.
        decisions: of each case and load, over 5 sampled problems in turn.
        progress: called with a line after each case and load.
    """
    warm_up(("memetic",))
    rows: list[BudgetRow] = []
    usual = sys.getswitchinterval()
    sys.setswitchinterval(GIL_SWITCH_SECONDS)
    try:
        for case in cases:
            problems = [
                sample_problem(
                    case.requests, case.nodes, case.models_per_node, case.queue, seed
                ).problem
                for seed in range(5)
            ]
            best = np.full(len(problems), np.inf)
            measured = []
            for load, busy in LOADS.items():
                with busy():
                    milliseconds, found = _decide(problems, case.budget_seconds, decisions)
                np.minimum.at(best, np.arange(decisions) % len(problems), found)
                measured.append((load, milliseconds, found))
                progress(f"{case.requests} requests, {case.queue.value}, {load}: done")
            reference = best[np.arange(decisions) % len(problems)]
            rows += [
                BudgetRow(
                    size=f"{case.requests}x{case.nodes * case.models_per_node}",
                    queue=case.queue.value,
                    load=load,
                    budget_milliseconds=1e3 * case.budget_seconds,
                    decisions=decisions,
                    decision_milliseconds_p50=float(np.median(milliseconds)),
                    decision_milliseconds_p95=float(np.quantile(milliseconds, 0.95)),
                    over_milliseconds_p95=float(
                        np.quantile(milliseconds, 0.95) - 1e3 * case.budget_seconds
                    ),
                    gap_percent=float(np.median(100.0 * (found - reference) / np.abs(reference))),
                )
                for load, milliseconds, found in measured
            ]
    finally:
        sys.setswitchinterval(usual)
    return rows


def rows_as_json(rows: list[BudgetRow]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(row) for row in rows]


def _decide(
    problems: list[RoutingProblem], budget_seconds: float, decisions: int
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]:
    """float64[decisions] milliseconds and float64[decisions] J."""
    policy, memory = MemeticPolicy(), DecisionMemory()
    milliseconds, found = np.empty(decisions), np.empty(decisions)
    for i in range(decisions):
        problem = problems[i % len(problems)]
        rng = np.random.default_rng(i)
        budget = Budget(budget_seconds, pause_seconds=memory.pause_seconds)
        started = time.perf_counter()
        decision = policy.decide(problem, rng, budget)
        milliseconds[i] = 1e3 * (time.perf_counter() - started)
        memory.paused(decision.pause_seconds)
        terms = evaluate(problem, decision.assignment[None, :])
        found[i] = objectives(problem, terms, bounds_of(problem))[0]
    return milliseconds, found


@contextlib.contextmanager
def _busy_thread() -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        text = "a" * 64
        while not stop.is_set():
            text = text[1:] + text[0]

    thread = threading.Thread(target=work, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5.0)


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        time.sleep(0.5)  # until they have started and spin
        yield
    finally:
        for process in processes:
            process.kill()
            process.join(5.0)


LOADS: Final[dict[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "idle": contextlib.nullcontext,
    "thread": _busy_thread,
    "process": lambda: _busy_processes(1),
    "processes": lambda: _busy_processes(os.cpu_count() or 1),
}
"""By name, what keeps the machine busy."""
