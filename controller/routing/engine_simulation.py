"""When each request of a batch will be answered, by stepping every node's engines.

Pure. The objective's bound is made for searching; this is made to be right, for deadlines, for the
client and for judging the model against reality. It begins with what is in flight: those requests
hold their slots and need what they still need.

Answers take up slots for their mean length; each one's own finish is that of its median length,
since lengths are very uneven.

The engine (ours): a destination has `slots`. A request with a slot is read first, then written, one
token a step, and a step of c sequences takes the seconds of `decode_step`. While some are
written, prompts are read in pieces of `CHUNK_SECONDS` between two steps, the shortest first; with
nobody writing they are read at full speed. Models of one node share its processor: while those that
are busy would use more than all of it, everything on the node slows down alike.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from controller.domain.cluster import Destination, InFlightWork
from controller.domain.engine_speed import CHUNK_SECONDS, decode_step
from controller.routing.formulation import FormulatedBatch
from controller.routing.policy import UNASSIGNED
from controller.routing.problem import FloatArray, IntArray

_BEFORE: Final = -1
"""Stands for a request of an earlier batch, whose finish nobody asks for."""


@dataclass(slots=True)
class _Task:
    request: int
    prompt_tokens: float
    output_tokens: float
    extra_tokens: float = 0.0  # median less mean
    writes_from: float = 0.0  # seconds


@dataclass(slots=True)
class _Engine:
    """One destination; `written` counts steps, which all its sequences share."""

    prefill_rate: float
    step_fixed: float
    step_each: float
    slots: int
    utilisation: float
    waiting: deque[_Task] = field(default_factory=deque)
    reading: list[tuple[float, int, _Task]] = field(default_factory=list)  # by tokens left
    writing: list[tuple[float, int, _Task]] = field(default_factory=list)  # by step of the end
    written: float = 0.0
    _number: int = 0

    @property
    def is_busy(self) -> bool:
        return bool(self.reading or self.writing)

    def admit(self, now: float) -> None:
        """Give free slots to those who wait, in their order."""
        while self.waiting and len(self.reading) + len(self.writing) < self.slots:
            task = self.waiting.popleft()
            self._number += 1
            if task.prompt_tokens > 0.0:
                heapq.heappush(self.reading, (task.prompt_tokens, self._number, task))
            else:
                self._write(task, now)

    def _write(self, task: _Task, now: float) -> None:
        self._number += 1
        task.writes_from = now
        # The prompt's last piece gives the first token.
        steps = max(task.output_tokens - (task.prompt_tokens > 0.0), 0.0)
        heapq.heappush(self.writing, (self.written + steps, self._number, task))

    def rates(self) -> tuple[float, float]:
        """Prompt tokens and steps a second, with the machine to itself."""
        if not self.writing:
            return self.prefill_rate, 0.0
        step = self.step_fixed + self.step_each * len(self.writing)
        if not self.reading:
            return 0.0, 1.0 / step
        both = CHUNK_SECONDS + step
        return self.prefill_rate * CHUNK_SECONDS / both, 1.0 / both

    def next_event(self) -> float:
        """Seconds until a prompt has been read or an answer ends, with the machine to itself."""
        prompt_rate, step_rate = self.rates()
        seconds = math.inf
        if self.reading:
            seconds = self.reading[0][0] / prompt_rate
        if self.writing:
            seconds = min(seconds, max(self.writing[0][0] - self.written, 0.0) / step_rate)
        return seconds

    def advance(self, seconds: float, now: float) -> list[_Task]:
        """Work for so long, until `now`, at most to the next event; returns what ended."""
        prompt_rate, step_rate = self.rates()
        self.written += step_rate * seconds
        read = []
        if self.reading:
            left, number, task = self.reading[0]
            left -= prompt_rate * seconds
            if left <= 1e-9 * max(task.prompt_tokens, 1.0):
                heapq.heappop(self.reading)
                read.append(task)
            else:
                heapq.heapreplace(self.reading, (left, number, task))
        ended = []
        while self.writing and self.writing[0][0] <= self.written + 1e-9:
            ended.append(heapq.heappop(self.writing)[2])
        for task in read:
            self._write(task, now)
        if ended or read:
            self.admit(now)
        return ended


def predicted_finish_seconds(batch: FormulatedBatch, assignment: IntArray) -> FloatArray:
    """When each request's answer is complete.

    Args:
        batch: the problem with its snapshot, whose requests in flight come first.
        assignment: int64[R]; destination index, or -1 for a request sent nowhere.

    Returns:
        float64[R], seconds after the snapshot; NaN for a request sent nowhere.

    Raises:
        ValueError: another shape, or an index that is no destination.
    """
    chosen = np.asarray(assignment)
    if chosen.shape != (batch.problem.n_requests,) or chosen.dtype.kind not in "iu":
        raise ValueError(f"assignment must be integers of shape ({batch.problem.n_requests},)")
    if chosen.min() < UNASSIGNED or chosen.max() >= batch.problem.n_destinations:
        raise ValueError(f"assignment outside [-1, {batch.problem.n_destinations})")
    finish = np.full(batch.problem.n_requests, np.nan)
    used = {int(batch.problem.node_of[d]) for d in chosen if d != UNASSIGNED}
    columns: dict[int, list[int]] = {node: [] for node in used}
    for d, node in enumerate(batch.problem.node_of.tolist()):
        if node in columns:
            columns[node].append(d)
    for node, own in columns.items():
        destinations = batch.snapshot.destinations
        engines = {d: _engine(destinations[d]) for d in own}
        _fill_in_flight(batch.snapshot.nodes[node].in_flight, engines, destinations)
        for r in range(batch.problem.n_requests):
            d = int(chosen[r])
            if d in engines:
                engines[d].waiting.append(
                    _Task(
                        r,
                        float(batch.read_tokens[r, d]),
                        float(batch.output_tokens[r, d]),
                        float(batch.median_tokens[r, d] - batch.output_tokens[r, d]),
                    )
                )
        _run(list(engines.values()), finish)
    rows = np.flatnonzero(chosen != UNASSIGNED)
    finish[rows] += batch.problem.network_seconds[rows, chosen[rows]]
    return finish


def _engine(destination: Destination) -> _Engine:
    slots = max(destination.slots, 1)
    fixed, each = decode_step(destination.calibration, slots)
    speeds = destination.calibration
    return _Engine(speeds.prefill_rate, fixed, each, slots, speeds.utilisation_ratio)


def _fill_in_flight(
    works: Sequence[InFlightWork], engines: dict[int, _Engine], destinations: Sequence[Destination]
) -> None:
    of_model = {destinations[d].model: engine for d, engine in engines.items()}
    for work in works:
        engine = of_model.get(work.model)
        if engine is not None:  # a model that is gone takes its requests with it
            engine.waiting.append(_Task(_BEFORE, work.prompt_tokens, work.output_tokens))


def _run(engines: list[_Engine], finish: FloatArray) -> None:
    """Step the engines of one node until everything is answered; fills `finish`."""
    now = 0.0
    for engine in engines:
        engine.admit(now)
    while busy := [engine for engine in engines if engine.is_busy]:
        slowdown = max(1.0, sum(engine.utilisation for engine in busy))
        seconds = min(engine.next_event() for engine in busy)
        now += seconds * slowdown
        for engine in busy:
            for task in engine.advance(seconds, now):
                if task.request != _BEFORE:
                    finish[task.request] = now + _extra_seconds(task, now)


def _extra_seconds(task: _Task, now: float) -> float:
    """From an answer's mean length, by which the others have to wait for it, to its median."""
    steps = max(task.output_tokens - 1.0, 1.0)
    return max(task.extra_tokens / steps, -1.0) * (now - task.writes_from)
