import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from edge_agent.errors import EXIT_NOT_READY, EXIT_READY, AgentError, NotRunningError
from edge_agent.status import StatusObject, StatusServer, ask_status, exit_code_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent" / "status.sock"


async def test_agent_answers_with_what_it_is_now(path: Path) -> None:
    status: StatusObject = {"state": "loading", "node_id": "pi", "hardware": "Böard"}
    server = StatusServer(path, lambda: status)
    await server.start()
    assert await ask_status(path) == status
    status["state"] = "ready"
    assert (await ask_status(path))["state"] == "ready"
    answers = await asyncio.gather(*(ask_status(path) for _ in range(20)))
    assert answers == [status] * 20
    await server.close()
    assert not path.exists()


async def test_socket_is_for_the_agents_user_and_group(path: Path) -> None:
    server = StatusServer(path, dict)
    await server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    await server.close()


async def test_second_agent_with_the_same_data_directory_does_not_start(path: Path) -> None:
    first = StatusServer(path, lambda: {"state": "ready"})
    await first.start()
    second = StatusServer(path, lambda: {"state": "second"})
    with pytest.raises(AgentError, match="already running"):
        await second.start()
    await second.close()
    assert await ask_status(path) == {"state": "ready"}
    await first.close()


async def test_socket_that_a_crash_left_is_taken_over(path: Path) -> None:
    path.parent.mkdir()
    crashed = await asyncio.start_unix_server(lambda *_: None, str(path))
    os.link(path, path.with_suffix(".kept"))
    crashed.close()
    await crashed.wait_closed()
    if not path.exists():  # newer Pythons remove it when they close it properly
        path.with_suffix(".kept").rename(path)
    server = StatusServer(path, lambda: {"state": "ready"})
    await server.start()
    assert await ask_status(path) == {"state": "ready"}
    await server.close()


async def test_nobody_there_is_not_running(path: Path) -> None:
    with pytest.raises(NotRunningError, match="edge-agent run"):
        await ask_status(path)


@pytest.mark.parametrize("answer", [b"", b"not JSON\n", b"[1, 2]\n", b'{"state": "re'])
async def test_nonsense_for_an_answer_is_told(path: Path, answer: bytes) -> None:
    path.parent.mkdir()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, str(path)):
        with pytest.raises(AgentError, match="no proper answer"):
            await ask_status(path)


async def test_path_that_cannot_be_a_socket_is_named(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 120) / "status.sock"
    with pytest.raises(AgentError, match="cannot listen"):
        await StatusServer(too_long, dict).start()


async def test_asker_that_leaves_at_once_disturbs_nobody(path: Path) -> None:
    server = StatusServer(path, lambda: {"state": "ready", "filler": "x" * 1_000_000})
    await server.start()
    for _ in range(5):
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.close()
    assert (await ask_status(path))["state"] == "ready"
    await server.close()


@pytest.mark.parametrize(
    ("state", "code"),
    [("ready", EXIT_READY), ("degraded", EXIT_NOT_READY), ("loading", EXIT_NOT_READY)],
)
def test_exit_code_says_whether_it_is_ready(state: str, code: int) -> None:
    assert exit_code_of(json.loads(json.dumps({"state": state}))) == code


def test_status_without_a_state_is_not_ready() -> None:
    assert exit_code_of({}) == EXIT_NOT_READY
