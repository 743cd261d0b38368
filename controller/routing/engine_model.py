"""One engine in time: who holds a slot, what is read, what is written, when an answer ends.

Pure, and stepped from event to event. `controller.routing.engine_simulation` predicts by it when a
batch will be answered. The simulator's nodes are the engine of `slots_alone`, whose sequences do
not slow each other; `controller.lab.simulator.engine` keeps thousands of those by a heap of their
ends, `controller.lab.training.vector_environment` by arrays, and tests hold both to this model.

The engine (ours): a request with a slot is read first, then written, one token a step, and a step
of c sequences takes the seconds of `decode_step`. While some are written, prompts are read in
pieces of `CHUNK_SECONDS` between two steps, the shortest first; with nobody writing they are read
at full speed. Models of one node share its processor: while those that are busy would use more than
all of it, everything on the node slows down alike.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from controller.domain.cluster import Destination
from controller.domain.engine_speed import CHUNK_SECONDS, decode_step


@dataclass(slots=True)
class EngineTask:
    """A request at an engine.

    Attributes:
        request: any number, the sender's.
        prompt_tokens, output_tokens: what is still to be read and written.
        extra_tokens: of its own answer, beyond the `output_tokens` that others wait for.
        writes_from: seconds; when its prompt had been read.
    """

    request: int
    prompt_tokens: float
    output_tokens: float
    extra_tokens: float = 0.0
    writes_from: float = 0.0


@dataclass(slots=True)
class EngineModel:
    """One destination's engine.

    Attributes:
        prefill_tokens_per_second: prompt tokens a second.
        step_fixed, step_each: seconds of a decoding step, and of each sequence in it.
        slots: sequences that are read or written at once.
        utilisation: of the node's processor, while it is busy.
        waiting: those without a slot, in their order.
        reading: by tokens left.
        writing: by the step of their end.
        written: steps, which all its sequences share.
    """

    prefill_tokens_per_second: float
    step_fixed: float
    step_each: float
    slots: int
    utilisation: float
    waiting: deque[EngineTask] = field(default_factory=deque)
    reading: list[tuple[float, int, EngineTask]] = field(default_factory=list)
    writing: list[tuple[float, int, EngineTask]] = field(default_factory=list)
    written: float = 0.0
    _number: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether anything holds a slot."""
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

    def _write(self, task: EngineTask, now: float) -> None:
        self._number += 1
        task.writes_from = now
        # The prompt's last piece gives the first token.
        steps = max(task.output_tokens - (task.prompt_tokens > 0.0), 0.0)
        heapq.heappush(self.writing, (self.written + steps, self._number, task))

    def rates(self) -> tuple[float, float]:
        """Prompt tokens and steps a second, with the machine to itself."""
        if not self.writing:
            return self.prefill_tokens_per_second, 0.0
        step = self.step_fixed + self.step_each * len(self.writing)
        if not self.reading:
            return 0.0, 1.0 / step
        both = CHUNK_SECONDS + step
        return self.prefill_tokens_per_second * CHUNK_SECONDS / both, 1.0 / both

    def next_event(self) -> float:
        """Seconds until a prompt has been read or an answer ends, with the machine to itself."""
        prompt_rate, step_rate = self.rates()
        seconds = math.inf
        if self.reading:
            seconds = self.reading[0][0] / prompt_rate
        if self.writing:
            seconds = min(seconds, max(self.writing[0][0] - self.written, 0.0) / step_rate)
        return seconds

    def advance(self, seconds: float, now: float) -> list[EngineTask]:
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


def engine_of(destination: Destination) -> EngineModel:
    """A destination's engine, with nothing to do."""
    slots, speeds = max(destination.slots, 1), destination.calibration
    fixed, each = decode_step(speeds, slots)
    return EngineModel(
        speeds.prefill_tokens_per_second, fixed, each, slots, speeds.utilisation_ratio
    )


def slots_alone(slots: int) -> EngineModel:
    """A server whose slots do not slow each other; a token of an answer is a second of service."""
    return EngineModel(math.inf, 1.0, 0.0, slots, 0.0)


def answered(engines: Sequence[EngineModel]) -> Iterator[tuple[float, EngineTask]]:
    """Step the engines of one node, from 0 s on, until everything is answered.

    Yields:
        When each task ended, seconds, in the order of the ends, and the task.
    """
    now = 0.0
    for engine in engines:
        engine.admit(now)
    while busy := [engine for engine in engines if engine.is_busy]:
        slowdown = max(1.0, sum(engine.utilisation for engine in busy))
        seconds = min(engine.next_event() for engine in busy)
        now += seconds * slowdown
        for engine in busy:
            for task in engine.advance(seconds, now):
                yield now, task
