import asyncio
import time

import pytest

from controller.telemetry.loop_lag import BOUNDS_SECONDS, STEP_SECONDS, LoopLag

pytestmark = pytest.mark.anyio


async def test_loop_that_was_held_up_is_seen_to_be_late() -> None:
    lag = LoopLag()
    watching = asyncio.create_task(lag.run())
    await asyncio.sleep(0)  # it sleeps now
    held = 4 * STEP_SECONDS
    time.sleep(held)  # noqa: ASYNC251 - what no coroutine may do
    while not sum(lag.counts):
        await asyncio.sleep(0.01)
    watching.cancel()
    late = held - STEP_SECONDS
    assert lag.total_seconds > 0.9 * late
    beyond = [
        count for bound, count in zip(BOUNDS_SECONDS, lag.counts, strict=True) if bound >= late
    ]
    assert sum(beyond) >= 1


def test_waking_early_is_not_late() -> None:
    lag = LoopLag()
    lag.observe(-0.002)
    assert lag.total_seconds == 0.0
    assert lag.counts[0] == 1
