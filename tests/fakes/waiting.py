"""Waiting in tests, never for ever."""

import asyncio
from collections.abc import Callable

import anyio

PATIENCE_SECONDS = 60.0
"""Bounds every wait; nothing should come near it."""


async def until(is_so: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Return once `is_so()` holds; it is asked again and again.

    Raises:
        TimeoutError: it never held.
    """
    with anyio.fail_after(seconds):
        while not is_so():
            await asyncio.sleep(0.002)
