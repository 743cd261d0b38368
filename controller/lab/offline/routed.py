"""Batches that the policy in force routes, to compare what was predicted with what came.

The requests of a batch are sent at once and go wherever the controller sends them; the next batch
is sent when all have been answered.
"""

import random
from collections.abc import Callable, Sequence

from controller.lab.offline.concurrency import together
from controller.lab.offline.fleet_view import FleetView
from controller.lab.offline.journal import Entry
from controller.lab.offline.questions import Question
from controller.lab.offline.recording import Recorder


def batches_of(
    questions: Sequence[Question], batches: int, batch_size: int, seed: int
) -> list[list[Question]]:
    """Random batches; a question comes again only when all have come.

    Args:
        questions: at least one.
        batches: how many.
        batch_size: questions in each.
        seed: the same one gives the same batches.
    """
    rng = random.Random(seed)
    drawn: list[Question] = []
    while len(drawn) < batches * batch_size:
        drawn += rng.sample(list(questions), len(questions))
    return [drawn[i * batch_size : (i + 1) * batch_size] for i in range(batches)]


async def send_batches(
    batches: Sequence[Sequence[Question]],
    recorder: Recorder,
    fleet: FleetView,
    finished: Callable[[Entry], None],
) -> None:
    """Send one batch after the other.

    Args:
        batches: of `batches_of`.
        recorder: asks and keeps.
        fleet: the recorder's.
        finished: called with what came of each question.

    Raises:
        JournalError: the journal cannot be written.
    """

    async def send(question: Question, others: int) -> None:
        finished(await recorder.record(question, None, others))

    async def send_all() -> None:
        for batch in batches:
            await together([send(question, len(batch) - 1) for question in batch])

    await together([send_all()], [fleet.run()])
