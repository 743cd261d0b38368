"""The policies' machine code: made in a process of its own once, and read back in this one."""

import asyncio
import contextlib
import sys
from typing import Final

import structlog

from controller.routing.compile_policies import compiled_mark

log = structlog.get_logger()

_COMPILE_SECONDS: Final = 1800.0
"""Most of a minute on a desktop's core, several on a small board."""

_LAST_WORDS: Final = 400
"""Characters of what a failed compilation said that go into the log."""


async def compile_once() -> None:
    """See to it that the machine code of the serving policies is kept.

    What cannot be compiled elsewhere, or kept, is compiled by this process when it is used: slower
    to start and larger from then on, which the log says.
    """
    mark = compiled_mark()
    if mark is None or mark.exists():
        return
    log.info("policies.compiling")
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "controller.routing.compile_policies",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,  # ours is for the line that says where we listen
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )  # fmt: skip
    except OSError as error:
        log.warning("policies.compile_failed", reason=str(error))
        return
    try:
        _, said = await asyncio.wait_for(process.communicate(), _COMPILE_SECONDS)
        if process.returncode != 0:
            reason = said.decode(errors="replace").strip()[-_LAST_WORDS:]
            log.warning("policies.compile_failed", reason=reason or f"code {process.returncode}")
    except asyncio.TimeoutError:
        log.warning("policies.compile_failed", reason=f"no end after {_COMPILE_SECONDS:g} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
