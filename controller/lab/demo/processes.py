"""The demonstration's processes: started with a log each, and never left behind."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from controller.lab.demo.errors import DemoError

_STOP_SECONDS: Final = 12.0
_PR_SET_PDEATHSIG: Final = 1


def command_path(name: str) -> str:
    """Where one of our commands is: beside this Python, else on the PATH.

    Raises:
        DemoError: it is not installed.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise DemoError(f"{name} is not installed; pip install 'pointsman[agent,controller]'")
    return found


@dataclass(slots=True)
class Processes:
    """Children in sessions of their own, so that Ctrl-C reaches them in our order.

    Args:
        log_folder: what each of them writes to standard error.
    """

    log_folder: Path
    _running: list[tuple[str, asyncio.subprocess.Process]] = field(default_factory=list)

    async def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> asyncio.subprocess.Process:
        """Start a child whose standard output can be read."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        with self.log_path(name).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *_ends_with_us(arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._running.append((name, process))
        return process

    def log_path(self, name: str) -> Path:
        """Where a child's log is."""
        return self.log_folder / f"{name}.log"

    def failure_of(self, name: str) -> str:
        """The last lines that a child wrote, for an error message."""
        lines = self.log_path(name).read_text(errors="replace").splitlines()[-5:]
        return "\n".join(lines) or "(it wrote nothing)"

    async def first_line(
        self, name: str, process: asyncio.subprocess.Process, seconds: float
    ) -> dict[str, Any]:
        """The JSON line that a child prints once it serves.

        Raises:
            DemoError: it ended, or printed nothing in time.
        """
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), seconds)
        except asyncio.TimeoutError as error:
            raise DemoError(
                f"{name} was not ready after {seconds:g} s; see {self.log_path(name)}"
            ) from error
        if not line:
            await process.wait()
            raise DemoError(
                f"{name} ended with code {process.returncode}:\n{self.failure_of(name)}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def ended(self) -> str | None:
        """The name of a child that has ended by itself; None while all run."""
        return next((name for name, p in self._running if p.returncode is not None), None)

    async def stop(self) -> None:
        """End every child, the last started first; those that do not listen are killed."""
        for name, process in reversed(self._running):
            _signal(process, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except asyncio.TimeoutError:
                print(f"{name} did not stop; killing it", file=sys.stderr)  # noqa: T201
                _signal(process, signal.SIGKILL)
                await process.wait()
        self._running.clear()


def _ends_with_us(arguments: Sequence[str]) -> Sequence[str]:
    """The command so wrapped that the kernel ends it when this process is killed outright."""
    if sys.platform != "linux":
        return arguments
    set_death_signal = (
        "import ctypes, os, sys; "
        f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
        # The kernel says nothing of a death before that call.
        f"os.getppid() == {os.getpid()} or sys.exit(1); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return (sys.executable, "-c", set_death_signal, *arguments)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a child's whole session when it is to be killed, else the child alone."""
    try:
        if number is signal.SIGKILL:
            os.killpg(process.pid, number)
        elif process.returncode is None:
            process.send_signal(number)
    except ProcessLookupError:
        pass
