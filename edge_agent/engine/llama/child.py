"""A spawned Python child that cannot outlive this process.

The child's own part of the bargain is in `edge_agent.engine.llama.llama_cpp`: it asks the kernel to
be killed with its parent, and it ends when its standard input closes.
"""

import asyncio
import collections
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

CHILD_MODULE: Final = "edge_agent.engine.llama.llama_cpp"
STDERR_TAIL_LINES: Final = 40
STDERR_LINE_BYTES: Final = 4096

# OpenMP's threads spin at every barrier, some hundred a token, until the last one arrives. When
# another process has the core that one waits for, the default spins for whole time slices:
# measured on two cores with two busy neighbours 1 token a second instead of 30. This many turns
# cost nothing on an idle machine and give the core away soon on a busy one.
OPENMP_ENVIRONMENT: Final = {"GOMP_SPINCOUNT": "300"}


class Child:
    """A running child with pipes to its standard input and output and the tail of its errors."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the child needs three pipes")
        self.process = process
        self.stdin = process.stdin
        self.stdout = process.stdout
        self._stderr = process.stderr
        self._tail: collections.deque[str] = collections.deque(maxlen=STDERR_TAIL_LINES)
        self._drain = asyncio.create_task(self._drain_stderr(), name=f"stderr-{process.pid}")

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.process.pid

    @property
    def stderr_tail(self) -> str:
        """The last lines that the child has written to standard error so far."""
        return "\n".join(self._tail)

    async def _drain_stderr(self) -> None:
        rest = b""
        while block := await self._stderr.read(STDERR_LINE_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            self._tail.extend(line.decode(errors="replace") for line in lines if line.strip())
            rest = rest[-STDERR_LINE_BYTES:]  # progress dots come without an end of line
        if rest.strip():
            self._tail.append(rest.decode(errors="replace"))

    async def wait(self) -> int:
        """Wait for the child's end and its last words.

        Returns:
            the exit status; -N when signal N ended it.
        """
        status = await self.process.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            # A grandchild could hold the pipe open for ever.
            await asyncio.wait_for(asyncio.shield(self._drain), timeout=1.0)
        return status

    async def stop(self, grace_seconds: float = 0.0) -> int:
        """End the child: ask first when there is a grace, then kill; safe to call again.

        Returns:
            the exit status; -N when signal N ended it.
        """
        if self.process.returncode is None and grace_seconds > 0:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.process.wait(), timeout=grace_seconds)
        if self.process.returncode is None:
            self.signal(signal.SIGKILL)
        status = await self.wait()
        self._drain.cancel()
        await asyncio.gather(self._drain, return_exceptions=True)
        self.stdin.close()
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a child that has just ended is no error."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


async def start_child(arguments: Sequence[str], *, niceness: int = 0) -> Child:
    """Spawn `python -m edge_agent.engine.llama.llama_cpp` with these arguments.

    It is a new program, never a fork of this one: forking a process that has used gRPC hangs
    (field failure G8). It gets its own session so that Ctrl-C in a terminal reaches the agent
    alone, which then ends the child in its own order. On Linux the child is killed with the
    thread that started it, which must therefore be the agent's main thread.

    Raises:
        OSError: the interpreter could not be started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        CHILD_MODULE,
        f"--parent={os.getpid()}",
        f"--nice={niceness}",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**OPENMP_ENVIRONMENT, **os.environ},
    )
    return Child(process)
