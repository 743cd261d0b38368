"""An agent that is started again serves what it was ordered to serve."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AGENT = str(Path(sys.executable).parent / "edge-agent")
SECONDS = 60.0


def ask(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [AGENT, *arguments, "--data-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def models_of(folder: Path) -> dict[str, dict[str, Any]]:
    status = json.loads(ask(folder, "status", "--json").stdout or "{}")
    return {model["name"]: model for model in status.get("models", ())}


def until(folder: Path, holds: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds(found := models_of(folder)):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


@contextmanager
def running_agent(folder: Path, end: signal.Signals) -> Iterator[None]:
    """An agent whose settings list one model, "fake-a", until it gets this signal."""
    command = [sys.executable, "-m", "tests.fakes.agent_process", str(folder), "127.0.0.1:9", ""]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until(folder, lambda models: bool(models))
            yield
            assert process.poll() is None
        finally:
            process.send_signal(end)
            process.wait(SECONDS)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_ordered_models_and_pins_are_there_after_a_restart(
    tmp_path: Path, end: signal.Signals
) -> None:
    """1. order one model and pin it, unload another; 2. end the agent; 3. start it again."""
    with running_agent(tmp_path, end):
        until(tmp_path, lambda models: models["fake-a"]["phase"] == "ready")
        assert ask(tmp_path, "models", "load", "fake-b", "--slots", "3").returncode == 0
        assert ask(tmp_path, "models", "pin", "fake-b").returncode == 0
        assert ask(tmp_path, "models", "unload", "fake-a").returncode == 0
    with running_agent(tmp_path, end):
        until(tmp_path, lambda models: models["fake-b"]["phase"] == "ready")
        models = models_of(tmp_path)
        assert models["fake-a"]["phase"] == "unloaded"
        assert (models["fake-b"]["slots"], models["fake-b"]["is_pinned"]) == (3, True)
        assert ask(tmp_path, "models", "unload", "fake-b").returncode == 0
        assert ask(tmp_path, "models", "unpin", "fake-b").returncode == 0
        assert ask(tmp_path, "models", "load", "fake-a").returncode == 0
    with running_agent(tmp_path, end):
        until(tmp_path, lambda models: models["fake-a"]["phase"] == "ready")
        assert set(models_of(tmp_path)) == {"fake-a"}, "what was undone leaves nothing behind"


def test_watched_status_outlives_the_agent(tmp_path: Path) -> None:
    """1. nobody is there, 2. an agent runs, 3. it has gone again."""
    command = [AGENT, "status", "--watch", "--json", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as watch:
        assert watch.stdout is not None
        lines = iter(watch.stdout.readline, b"")

        def until_running(is_wanted: bool) -> None:
            deadline = time.monotonic() + SECONDS
            while (json.loads(next(lines))["state"] != "not_running") is not is_wanted:
                assert time.monotonic() < deadline

        try:
            until_running(False)
            with running_agent(tmp_path, signal.SIGTERM):
                until_running(True)
            until_running(False)
            watch.send_signal(signal.SIGINT)
            assert watch.wait(SECONDS) == 0
        finally:
            watch.kill()
