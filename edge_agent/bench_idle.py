"""What the agent itself costs, without an engine: memory, processor time, and time to start."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

_START_SECONDS: Final = 30.0
_HEAVY: Final = ("libtorch", "_multiarray_umath", "libllama")
"""Shared objects that the parent process must not have mapped."""


@dataclass(frozen=True, slots=True)
class IdleReport:
    """One agent without models and without a controller.

    Attributes:
        start_seconds: from starting the process until its status socket is there.
        resident_bytes: of the process.
        core_ratio: share of one core, telemetry included.
        seconds: watched for the share.
        heavy_libraries: of NumPy, torch or llama.cpp, that it has mapped; there should be none.
    """

    start_seconds: float
    resident_bytes: int
    core_ratio: float
    seconds: float
    heavy_libraries: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, under the names of the fields."""
        return asdict(self)


def measure_idle(seconds: float = 20.0) -> IdleReport:
    """Start an agent of its own, watch it for a while, and stop it.

    Raises:
        RuntimeError: it did not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "status.sock"
        command = [sys.executable, "-m", "edge_agent.cli", "run", "--data-dir", folder]
        command += ["--controller", "127.0.0.1:9", "--insecure"]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        started = time.monotonic()
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ
        ) as process:
            try:
                while not path.exists():
                    if process.poll() is not None or time.monotonic() - started > _START_SECONDS:
                        raise RuntimeError("the agent did not start; try `edge-agent run` itself")
                    time.sleep(0.01)
                start_seconds = time.monotonic() - started
                time.sleep(2.0)  # what happens once at the start is not idling
                watched = psutil.Process(process.pid)
                before, began = sum(watched.cpu_times()[:2]), time.monotonic()
                time.sleep(seconds)
                spent = sum(watched.cpu_times()[:2]) - before
                lasted = time.monotonic() - began
                mapped = {entry.path for entry in watched.memory_maps()}
                return IdleReport(
                    start_seconds,
                    int(watched.memory_info().rss),
                    spent / lasted,
                    lasted,
                    tuple(sorted(p for p in mapped if any(name in p for name in _HEAVY))),
                )
            finally:
                process.terminate()
                try:
                    process.wait(10.0)
                except subprocess.TimeoutExpired:
                    process.kill()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure_idle().as_dict()) + "\n")
