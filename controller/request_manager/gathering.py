"""Requests that wait for company: the open window, and the timer that closes it."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from controller.config import BatchingSettings
from controller.ids import RequestId
from controller.request_manager.window import (
    CloseReason,
    FleetLoad,
    Window,
    WindowLimits,
    closes_at,
)


class Waits(Protocol):
    """What can wait here."""

    @property
    def request_id(self) -> RequestId:
        """Its name, which no other that waits has."""
        ...

    @property
    def start_by(self) -> float | None:
        """When its window must have closed, monotonic seconds; None when it has no deadline."""
        ...


W = TypeVar("W", bound=Waits)


class Gathering(Generic[W]):
    """The waiting requests, in order of arrival. Belongs to the event loop.

    Args:
        load: the fleet's load now.
    """

    def __init__(self, batching: BatchingSettings, load: Callable[[], FleetLoad]) -> None:
        self._limits = WindowLimits(
            batching.window_seconds, batching.max_requests, batching.quiet_seconds
        )
        self._load = load
        self._waiting: dict[RequestId, W] = {}
        self._window: Window | None = None
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: W) -> None:
        """Take in one that has come, or comes back."""
        self._waiting[request.request_id] = request
        self._arrived(request, time.monotonic())
        self._changed.set()

    def remove(self, request: W) -> None:
        """Let one go that waits no more."""
        del self._waiting[request.request_id]

    def look_again(self) -> None:
        """The fleet's load has changed, which may let the window close."""
        self._changed.set()

    async def batch(self) -> tuple[list[W], float, CloseReason]:
        """Wait until a window closes: its requests, when it closed (monotonic seconds) and why."""
        while True:
            while self._window is not None and self._waiting:
                moment, reason = closes_at(self._window, self._limits, self._load())
                delay = moment - time.monotonic()
                if delay <= 0:
                    now = time.monotonic()
                    return self._take(now), now, reason
                timer = asyncio.get_running_loop().call_later(delay, self._changed.set)
                try:
                    await self._changed.wait()
                finally:
                    timer.cancel()
                self._changed.clear()
            if not self._waiting:
                self._window = None
            await self._changed.wait()
            self._changed.clear()

    def _take(self, now: float) -> list[W]:
        batch = list(self._waiting.values())[: self._limits.max_requests]
        for request in batch:
            del self._waiting[request.request_id]
        # What did not fit opens the next window, with the deadlines it came with.
        self._window = None
        for request in self._waiting.values():
            self._arrived(request, now)
        return batch

    def _arrived(self, request: W, now: float) -> None:
        window = self._window or Window(now, now, 0)
        self._window = window.with_arrival(now, request.start_by)
