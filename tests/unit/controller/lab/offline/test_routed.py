"""Batches are drawn by the seed, and what runs together ends together."""

import asyncio

import pytest

from controller.domain.request import ChatMessage
from controller.lab.offline.concurrency import together
from controller.lab.offline.graders import Grader, Key
from controller.lab.offline.questions import Question
from controller.lab.offline.routed import batches_of

QUESTIONS = [
    Question("w", str(n), "c", (ChatMessage("user", "x"),), Key(Grader.NONE)) for n in range(5)
]


def test_question_comes_again_only_when_all_have_come() -> None:
    batches = batches_of(QUESTIONS, batches=4, batch_size=5, seed=1)
    assert [len(batch) for batch in batches] == [5, 5, 5, 5]
    for batch in batches:
        assert {question.question_id for question in batch} == {"0", "1", "2", "3", "4"}
    assert batches == batches_of(QUESTIONS, batches=4, batch_size=5, seed=1)
    assert batches != batches_of(QUESTIONS, batches=4, batch_size=5, seed=2)
    assert [len(batch) for batch in batches_of(QUESTIONS, 3, 7, 0)] == [7, 7, 7]


def test_first_failure_ends_the_others_and_the_background() -> None:
    ended: list[str] = []

    async def forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    async def scenario() -> None:
        with pytest.raises(ValueError, match="broken"):
            await together([forever("work"), fail()], [forever("background")])
        assert sorted(ended) == ["background", "work"]
        await together([asyncio.sleep(0)], [forever("later"), asyncio.sleep(0)])
        assert ended[-1] == "later"

    asyncio.run(asyncio.wait_for(scenario(), 10))
