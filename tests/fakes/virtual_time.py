"""Time that passes at once: whoever sleeps wakes as soon as nobody else has anything to do."""

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any


class VirtualTime:
    """Sleepers wake in the order of their times, as soon as nobody else can go on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._numbers = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._numbers), future))
        await future

    async def _advance(self) -> None:
        while True:
            for _ in range(30):
                await asyncio.sleep(0)
            while self._sleepers:
                wakes_at, _, future = heapq.heappop(self._sleepers)
                if not future.done():
                    self.now = max(self.now, wakes_at)
                    future.set_result(None)
                    break

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def main() -> Any:
            ticker = asyncio.create_task(self._advance())
            try:
                return await work
            finally:
                ticker.cancel()

        return asyncio.run(main())
