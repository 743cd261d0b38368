"""A node is told to forget a completion once its story is on disk, and not before."""

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from controller.storage.sqlite_file import FILE_NAME
from pointsman.v1 import fleet_pb2, types_pb2
from tests.fakes.agent_session import ScriptedAgent, scripted_agent
from tests.fakes.fleet import running_fleet
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio

USAGE = types_pb2.Usage(prompt_tokens=3, completion_tokens=5)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.contextmanager
def nothing_can_be_written(database: Path) -> Iterator[None]:
    blocker = sqlite3.connect(database, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        blocker.execute("ROLLBACK")
        blocker.close()


def completion_of(order: Any) -> fleet_pb2.Completion:
    return fleet_pb2.Completion(
        request_id=order.request_id,
        attempt=order.attempt,
        model=order.model,
        finish_reason=types_pb2.FINISH_REASON_STOP,
        usage=USAGE,
    )


def acknowledged(agent: ScriptedAgent) -> int:
    return max((message.acked_sequence for message in agent.received), default=0)


def finished(database: Path) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT request_id, state FROM requests").fetchall()


@contextlib.asynccontextmanager
async def asked_of_an_agent(
    folder: Path,
) -> AsyncIterator[tuple[ScriptedAgent, Any, "asyncio.Task[Any]"]]:
    """An agent that has been ordered to answer a request, and the client's waiting for it."""
    async with (
        running_fleet(folder) as fleet,
        scripted_agent(fleet.listening.grpc_address) as agent,
    ):
        await fleet.wait_for_state("pi", "ready")
        asked = asyncio.create_task(fleet.infer())
        (order,) = await agent.until("work")
        yield agent, order, asked


async def test_a_completion_is_acknowledged_after_the_commit_that_keeps_it(tmp_path: Path) -> None:
    database = tmp_path / "controller" / FILE_NAME
    async with asked_of_an_agent(tmp_path) as (agent, order, asked):
        with nothing_can_be_written(database):
            agent.say(sequence=1, completion=completion_of(order))
            await asked  # the client waits for no disk
            for _ in range(30):  # longer than the writer gathers
                await asyncio.sleep(0.01)
                assert acknowledged(agent) == 0
        await until(lambda: acknowledged(agent) == 1)
        assert finished(database) == [(order.request_id, "completed")]


async def test_what_a_killed_controller_had_not_kept_is_sent_again_and_told(tmp_path: Path) -> None:
    left_behind = tmp_path / "next" / "controller"
    async with asked_of_an_agent(tmp_path) as (agent, order, asked):
        with nothing_can_be_written(tmp_path / "controller" / FILE_NAME):
            agent.say(sequence=1, completion=completion_of(order))
            await asked
            # What the disk holds now is what SIGKILL would leave.
            shutil.copytree(tmp_path / "controller", left_behind)
            assert acknowledged(agent) == 0
    with capture_logs() as logs:
        async with (
            running_fleet(tmp_path / "next") as fleet,
            scripted_agent(fleet.listening.grpc_address) as agent,
        ):
            (welcome,) = await agent.until("welcome")
            assert welcome.acked_sequence == 0
            agent.say(sequence=1, completion=completion_of(order))
            await until(lambda: acknowledged(agent) == 1)
    (told,) = [line for line in logs if line["event"] == "completion.unknown"]
    assert told["request_id"] == order.request_id
    assert told["completion_tokens"] == USAGE.completion_tokens
