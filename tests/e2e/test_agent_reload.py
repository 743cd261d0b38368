"""A running agent takes new settings on SIGHUP, and keeps the old ones when they are wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

AGENT = str(Path(sys.executable).parent / "edge-agent")
SECONDS = 100.0


def settings(folder: Path, node_id: str = "hup", watts: str = "10", extra: str = "") -> str:
    return f"""\
node_id = "{node_id}"
data_dir = "{folder / "data"}"
models = []
{extra}
[controller]
address = "127.0.0.1:9"
insecure = true
[power]
idle_watts = 3
max_watts = {watts}
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    file = tmp_path / "agent.toml"
    file.write_text(settings(tmp_path))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([AGENT, "run", "--config", str(file)], stdout=log, stderr=log)
        try:
            until(tmp_path, lambda issues: bool(issues))
            yield process, file
            assert process.poll() is None  # nothing that it was told has ended it
        finally:
            process.terminate()
            process.wait(SECONDS)


def issues_of(folder: Path) -> list[str]:
    run = subprocess.run(
        [AGENT, "status", "--json", "--data-dir", str(folder / "data")],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    found: list[str] = json.loads(run.stdout or "{}").get("issues", [])  # none: not running yet
    return found


def until(folder: Path, holds: Callable[[list[str]], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds(found := issues_of(folder)):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def has(name: str) -> Callable[[list[str]], bool]:
    return lambda issues: any(issue.startswith(f"{name}:") for issue in issues)


def test_wrong_settings_are_told_and_mended_ones_taken(agent, tmp_path: Path) -> None:
    process, file = agent
    file.write_text(settings(tmp_path, extra="no_such_setting = 1"))
    os.kill(process.pid, signal.SIGHUP)
    until(tmp_path, has("settings_invalid"))
    file.write_text(settings(tmp_path, watts="12"))
    os.kill(process.pid, signal.SIGHUP)
    until(tmp_path, lambda issues: bool(issues) and not has("settings_invalid")(issues))
    assert not has("restart_needed")(issues_of(tmp_path))


def test_what_needs_a_restart_says_so(agent, tmp_path: Path) -> None:
    process, file = agent
    file.write_text(settings(tmp_path, node_id="another"))
    os.kill(process.pid, signal.SIGHUP)
    until(tmp_path, has("restart_needed"))
