"""Several coroutines at once: the first that fails ends the others."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def together(
    works: Sequence[Coroutine[Any, Any, object]],
    background: Sequence[Coroutine[Any, Any, object]] = (),
) -> None:
    """Run all works to their end, and what is in the background as long as they run.

    Raises:
        Exception: what the first of them raised; the others are cancelled and have ended.
    """
    tasks = [asyncio.create_task(work) for work in works]
    others = [asyncio.create_task(work) for work in background]
    try:
        remaining, running = set(tasks), set(others)
        while remaining:
            done, _ = await asyncio.wait(
                [*remaining, *running], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            remaining -= done
            running -= done
    finally:
        for task in (*tasks, *others):
            task.cancel()
        await asyncio.gather(*tasks, *others, return_exceptions=True)
