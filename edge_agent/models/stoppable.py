"""Blocking work in a thread that its caller can stop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")


async def run_stoppable(work: Callable[[threading.Event], T]) -> T:
    """Run blocking work in a thread and return its result.

    When the caller is cancelled the event is set and the work waited for, so nothing touches a
    file after its lock was given up. The work must look at the event at least every second.
    """
    stop = threading.Event()

    async def in_thread() -> T:
        return await anyio.to_thread.run_sync(work, stop)

    task = asyncio.create_task(in_thread(), name="stoppable-work")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        with suppress(Exception):  # nobody is left to hear of it
            await task
        raise
