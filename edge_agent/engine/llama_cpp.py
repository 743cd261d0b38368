"""The child process: the only module that imports llama.cpp.

Run as `python -m edge_agent.engine.llama_cpp [--parent=PID] [--nice=N] COMMAND ...`:

    quantise SOURCE TARGET QUANTISATION THREADS    writes another quantisation of a file
"""

import argparse
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO, Final

_PR_SET_PDEATHSIG: Final = 1


def _die_with_parent(parent: int | None) -> None:
    """Ask the kernel to kill this process when its parent ends, whatever the reason."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had gone before we asked
        os._exit(0)


def _die_at_end_of(stream: BinaryIO) -> None:
    """End this process when a stream that the parent holds open ends."""

    def watch() -> None:
        while stream.read(1):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take standard input and output for ourselves.

    Whatever a library prints to standard output goes to standard error from here on, so that it
    cannot end up between our messages.

    Returns:
        the stream from the parent, the stream to the parent.
    """
    source = os.fdopen(os.dup(0), "rb", buffering=0)
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return source, sink


def _quantise(source: Path, target: Path, quantisation: str, threads: int) -> int:
    """Write another quantisation and see it on the disk; the exit status is the answer."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    prefix = "LLAMA_FTYPE_MOSTLY_"
    parameters.ftype = getattr(llama_cpp, prefix + quantisation)
    parameters.nthread = threads
    parameters.allow_requantize = True
    status = llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(parameters)
    )
    if status == 0:
        with target.open("rb+") as file:
            os.fsync(file.fileno())
    return int(status)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 when it did what it was asked."""
    parser = argparse.ArgumentParser(prog="edge_agent.engine.llama_cpp")
    parser.add_argument("--parent", type=int)
    parser.add_argument("--nice", type=int, default=0)
    commands = parser.add_subparsers(dest="command", required=True)
    quantise = commands.add_parser("quantise")
    quantise.add_argument("source", type=Path)
    quantise.add_argument("target", type=Path)
    quantise.add_argument("quantisation")
    quantise.add_argument("threads", type=int)
    options = parser.parse_args(arguments)

    _die_with_parent(options.parent)
    source, _sink = _private_pipes()
    if options.nice:
        os.nice(options.nice)
    _die_at_end_of(source)
    return _quantise(options.source, options.target, options.quantisation, options.threads)


if __name__ == "__main__":
    sys.exit(main())
