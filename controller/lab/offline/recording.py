"""Asks one question, grades the answer, teaches the score and keeps it all."""

import asyncio
import time

from controller.client import Client
from controller.lab.offline.accounts import HowAsked, measurement
from controller.lab.offline.fleet_view import FleetView, ProfiledTarget
from controller.lab.offline.graders import grade
from controller.lab.offline.journal import Entry, Failure, Journal
from controller.lab.offline.measurements import Measurement
from controller.lab.offline.question_sender import (
    Answered,
    Sending,
    Teacher,
    Unanswered,
    ask_patiently,
    batch_size,
)
from controller.lab.offline.questions import Question


class Recorder:
    """What all questions of a run go through.

    Args:
        client: of the controller.
        fleet: refreshed at least once, and kept fresh by `FleetView.run`.
        journal: open.
        sending: how questions are sent.
        teacher: takes the scores.
    """

    def __init__(
        self,
        client: Client,
        fleet: FleetView,
        journal: Journal,
        sending: Sending,
        teacher: Teacher,
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._journal = journal
        self._sending = sending
        self._teacher = teacher
        self._writing = asyncio.Lock()
        self.answered = 0
        self.failed = 0

    async def record(self, question: Question, target: ProfiledTarget | None, others: int) -> Entry:
        """Ask one question; what came of it is in the journal when this returns.

        Args:
            question: to ask.
            target: the only destination; None leaves it to the policy in force.
            others: questions of this run that are under way beside this one.

        Raises:
            TargetGoneError: the target was not ready for as long as it was waited for.
            JournalError: the journal cannot be written.
        """
        outcome = await ask_patiently(self._client, self._fleet, question, self._sending, target)
        entry: Entry
        if isinstance(outcome, Answered):
            entry = await self._measured(question, target, others, outcome)
            self.answered += 1
        else:
            entry = _failure(question, target, outcome)
            self.failed += 1
        async with self._writing:
            await asyncio.to_thread(self._journal.append, entry)
        return entry

    async def _measured(
        self, question: Question, target: ProfiledTarget | None, others: int, outcome: Answered
    ) -> Measurement:
        account = outcome.account
        score = grade(question.key, outcome.text)
        # Before the journal, so that a crash between the two teaches twice rather than never.
        await self._teacher.teach(account.request_id, score.score_ratio)
        asked = HowAsked(
            self._journal.plan.run_id,
            _kind(target),
            self._sending.max_tokens_of(question),
            self._sending.seed,
            others,
            await batch_size(self._client, account.request_id),
        )
        node = self._fleet.node(account.node_id)
        return measurement(question, asked, outcome.text, score, account, node)


def _kind(target: ProfiledTarget | None) -> str:
    return "routed" if target is None else "profiled"


def _failure(question: Question, target: ProfiledTarget | None, outcome: Unanswered) -> Failure:
    return Failure(
        _kind(target),
        question.workload,
        question.question_id,
        target.node_id if target else "",
        target.model if target else "",
        outcome.attempts,
        outcome.error,
        time.time(),
    )
