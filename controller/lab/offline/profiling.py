"""The profiling run: every question to every destination, measured, graded and journalled.

Nodes are profiled side by side. The models of one node take turns, since what they would take from
each other is nothing that a measurement should have in it. At each destination a bounded number of
questions is under way.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from controller.lab.offline.concurrency import together
from controller.lab.offline.fleet_view import FleetView, ProfiledTarget
from controller.lab.offline.journal import Entry, Journal, Plan, read_journal
from controller.lab.offline.measurements import Measurement
from controller.lab.offline.question_sender import TargetGoneError, Teacher
from controller.lab.offline.questions import Question
from controller.lab.offline.recording import Recorder
from controller.storage.digests import file_digest


@dataclass(frozen=True, slots=True)
class ProfilingProgress:
    """What a run tells while it goes; each may be called often.

    Attributes:
        started: (target, questions, of them answered before).
        finished: (target, what came of one question).
        gone: (target, questions that are left).
    """

    started: Callable[[ProfiledTarget, int, int], None]
    finished: Callable[[ProfiledTarget, Entry], None]
    gone: Callable[[ProfiledTarget, int], None]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What came of a run.

    Attributes:
        answered: questions that were answered in this run, over all destinations.
        answered_before: in the runs that it went on with.
        failed: that nobody answered.
        left: that were not asked, since their destination went away.
        taught: scores that the controller took.
        refusal: why it took none, in its words. Empty: it took all.
    """

    answered: int
    answered_before: int
    failed: int
    left: int
    taught: int
    refusal: str


def plan_of(
    workloads: Sequence[tuple[Path, str]],
    questions: Sequence[Question],
    max_tokens: int,
    seed: int,
    run_id: str | None = None,
) -> Plan:
    """What a run is of, for its journal.

    Args:
        workloads: each file and its format.
        questions: all that were chosen.
        max_tokens: of questions that give none.
        seed: of the sampling.
        run_id: None makes a new one.
    """
    digest = hashlib.sha256()
    for question in questions:
        digest.update(repr(question).encode())
    return Plan(
        run_id or uuid.uuid4().hex[:12],
        tuple(f"{path.name} {format} {file_digest(path)}" for path, format in workloads),
        digest.hexdigest(),
        max_tokens,
        seed,
    )


class ProfilingRun:
    """One run over a fleet.

    Args:
        recorder: asks and keeps.
        fleet: the recorder's.
        journal: the recorder's; what it holds already is not asked again.
        teacher: the recorder's.
        progress: is told.
        concurrency: questions under way at one destination.
    """

    def __init__(
        self,
        recorder: Recorder,
        fleet: FleetView,
        journal: Journal,
        teacher: Teacher,
        progress: ProfilingProgress,
        concurrency: int,
    ) -> None:
        self._recorder = recorder
        self._fleet = fleet
        self._journal = journal
        self._teacher = teacher
        self._progress = progress
        self._concurrency = concurrency
        self._left = 0

    async def run(
        self, questions: Sequence[Question], targets: Sequence[ProfiledTarget]
    ) -> RunOutcome:
        """Ask all that is not answered yet.

        Raises:
            JournalError: the journal cannot be read or written.
        """
        done = await asyncio.to_thread(self._done)
        answered_before = 0
        by_node: dict[str, list[tuple[ProfiledTarget, list[Question]]]] = {}
        for target in targets:
            digest = self._fleet.model(target).digest
            remaining = [
                q for q in questions if (q.workload, q.question_id, target, digest) not in done
            ]
            before = len(questions) - len(remaining)
            answered_before += before
            self._progress.started(target, len(questions), before)
            by_node.setdefault(target.node_id, []).append((target, remaining))
        await together([self._profile_node(work) for work in by_node.values()], [self._fleet.run()])
        return RunOutcome(
            self._recorder.answered,
            answered_before,
            self._recorder.failed,
            self._left,
            self._teacher.taught,
            self._teacher.refusal,
        )

    def _done(self) -> set[tuple[str, str, ProfiledTarget, str]]:
        """What is answered, by the very file that the model is of."""
        return {
            (
                row.workload,
                row.question_id,
                ProfiledTarget(row.node_id, row.model),
                row.model_digest,
            )
            for row in read_journal(self._journal.folder)
            if isinstance(row, Measurement)
        }

    async def _profile_node(self, work: Sequence[tuple[ProfiledTarget, list[Question]]]) -> None:
        for target, questions in work:
            await self._profile_target(target, questions)

    async def _profile_target(self, target: ProfiledTarget, questions: Sequence[Question]) -> None:
        waiting = iter(questions)
        finished = 0
        under_way = 0

        async def worker(waiting: Iterator[Question]) -> None:
            nonlocal finished, under_way
            for question in waiting:
                under_way += 1
                try:
                    entry = await self._recorder.record(question, target, under_way - 1)
                finally:
                    under_way -= 1
                finished += 1
                self._progress.finished(target, entry)

        try:
            await together([worker(waiting) for _ in range(self._concurrency)])
        except TargetGoneError:
            left = len(questions) - finished
            self._left += left
            self._progress.gone(target, left)
