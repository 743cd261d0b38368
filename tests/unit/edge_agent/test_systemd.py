"""The agent's word to systemd."""

import os
import socket
from pathlib import Path

import anyio
import pytest

from edge_agent.systemd import feed_watchdog, watchdog_seconds

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_watchdog_time_is_for_the_process_it_names() -> None:
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000"}) == 30.0
    mine = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    assert watchdog_seconds(mine) == 30.0
    assert watchdog_seconds({**mine, "WATCHDOG_PID": "1"}) is None
    for text in ("", "0", "-5", "soon"):
        assert watchdog_seconds({"WATCHDOG_USEC": text}) is None


async def test_nobody_watches_outside_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    with anyio.fail_after(60):
        await feed_watchdog(lambda: True)


async def test_watchdog_is_fed_only_while_the_agent_is_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. healthy, 2. unhealthy twice, 3. healthy again: two messages."""
    path = tmp_path / "notify"
    health = [True, False, False, True]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "2000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:

                def is_healthy() -> bool:
                    if not health:
                        tasks.cancel_scope.cancel()
                        return False
                    return health.pop(0)

                tasks.start_soon(feed_watchdog, is_healthy)
        assert systemd.recv(100) == b"WATCHDOG=1"
        assert systemd.recv(100) == b"WATCHDOG=1"
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
