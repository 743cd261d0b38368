"""Tries something out in a copy of this process, so that what kills the copy kills nobody else.

Part of an engine's child: llama.cpp reads grammars in C++ that was never meant for strangers'
input, and a grammar that overruns its stack would otherwise take every running answer with it.
"""

import contextlib
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from typing import Final

MOST_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.002
_MOST_OUTPUT_BYTES: Final = 4096
_GOOD: Final = 0
_BAD: Final = 1


class TooLongError(Exception):
    """The attempt was ended because it took too long."""


def survives(attempt: Callable[[], bool], seconds: float = MOST_SECONDS) -> tuple[bool, str]:
    """Whether an attempt comes to a good end, and what it wrote to standard error.

    Args:
        attempt: runs in a copy of this process; True is a good end.
        seconds: how long it may take.

    Raises:
        TooLongError: it took longer.
        OSError: this process cannot be copied.
    """
    source, sink = os.pipe()
    try:
        # llama.cpp repeats the whole grammar; what does not fit into the pipe is dropped.
        os.set_blocking(sink, False)
        os.set_blocking(source, False)
        with warnings.catch_warnings():
            # Python fears for the locks of other threads; the copy runs nothing but `attempt`.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _be_the_copy(attempt, sink, seconds)
        status = _wait(pid, time.monotonic() + seconds)
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(source, _MOST_OUTPUT_BYTES)
    finally:
        os.close(source)
        os.close(sink)
    is_good = os.WIFEXITED(status) and os.WEXITSTATUS(status) == _GOOD
    return is_good, said.decode(errors="replace")


def _be_the_copy(attempt: Callable[[], bool], output: int, seconds: float) -> None:
    """Run the attempt and leave, whatever happens."""
    status = _BAD
    try:
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Should the original be killed meanwhile, the copy must end by itself.
        limit = int(seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        status = _GOOD if attempt() else _BAD
    finally:
        os._exit(status)


def _wait(pid: int, deadline: float) -> int:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TooLongError
        time.sleep(_POLL_SECONDS)
