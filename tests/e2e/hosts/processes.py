"""Commands of the control side that end with the test run."""

import contextlib
import queue
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

STOP_DEADLINE_SECONDS: Final = 20.0


class NotStartedError(RuntimeError):
    """A process ended or stayed silent where it should have said that it is ready."""


@contextlib.contextmanager
def running(
    command: Sequence[str],
    log_file: Path,
    ready_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run a server while the block runs, and give the block its first line of output.

    It is told to stop when the block ends, killed if it does not, and killed by the kernel if
    the test run itself is.

    Args:
        command: program and arguments.
        log_file: where its standard error goes.
        ready_seconds: how long it may take to print the first line.
        environment: in place of ours.

    Raises:
        NotStartedError: it printed no line in time; the text has the end of the log.
    """
    with (
        log_file.open("wb") as log,
        subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        ) as process,
    ):
        output = process.stdout
        assert output is not None
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put("")  # it closed its output

        # Goes on reading while the block runs, so that a talkative server never blocks.
        reader = threading.Thread(target=read, name=f"output of {command[0]}")
        reader.start()
        try:
            try:
                first_line = lines.get(timeout=ready_seconds)
            except queue.Empty:
                first_line = ""
            if not first_line:
                tail = log_file.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise NotStartedError(f"{command[0]} did not say that it is ready\n{tail}")
            yield first_line
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_DEADLINE_SECONDS)
            reader.join(STOP_DEADLINE_SECONDS)
