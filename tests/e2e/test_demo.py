"""The demonstration as a user runs it: real processes, real weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.llama, pytest.mark.slow, pytest.mark.timeout(900)]

COMMAND = [str(Path(sys.executable).with_name("edge-controller")), "lab", "demo"]


def our_processes(cache: Path) -> list[str]:
    """Command lines of what the demonstration started, wherever it is now."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(cache / "demo") in line or str(cache / "models") in line:
            found.append(line)
    return found


@pytest.fixture
def cache(tmp_path: Path, smollm2: Path) -> Path:
    """A cache of its own, so that its processes can be told apart, with the weights linked in."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "models").symlink_to(smollm2.parent)
    return folder


def test_demo_answers_everything_and_leaves_nothing_behind(cache: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ended = subprocess.run(
        [*COMMAND, "--cache", str(cache), "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    policies = json.loads(figures.read_text())["policies"]
    assert set(policies) == {"memetic", "round-robin", "least-loaded"}
    for result in policies.values():
        assert (result["requests"], result["failed"]) == (24, 0)
        assert result["quality"] > 0.2  # guessing nothing at all would give about 0
        assert result["energy_joules"] > 0
        assert result["makespan_measured_seconds"] > 0
    assert policies["memetic"]["objective"] <= policies["round-robin"]["objective"] + 0.05
    assert our_processes(cache) == []


@pytest.mark.parametrize("how", ["interrupted", "killed", "unread"])
def test_demo_that_ends_early_leaves_nothing_behind(cache: Path, how: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--cache", str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("Agent jetson"):
                break
        deadline = time.monotonic() + 200
        while not any("jetson.toml" in line for line in our_processes(cache)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.stdout.close()  # for "unread" this is `edge-controller lab demo | head -3`
        if how != "unread":
            # The latter is what Ctrl-C in a terminal does.
            os.killpg(process.pid, signal.SIGKILL if how == "killed" else signal.SIGINT)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    deadline = time.monotonic() + 100  # the kernel's signal lets agents drain
    while how == "killed" and our_processes(cache) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert our_processes(cache) == []
