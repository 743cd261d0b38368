"""Whether an endpoint can be used: one that failed is asked until it answers again."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from edge_agent.engine.remote.endpoint import Listing, RemoteError, RemoteIssue

log = structlog.get_logger()

_NEEDS_CHANGE: Final = frozenset({RemoteIssue.KEY_REFUSED, RemoteIssue.QUOTA_EXHAUSTED})
"""Issues that an endpoint's list of models does not show to be gone."""


class EndpointWatch:
    """Asks a failed endpoint, with growing pauses, until it can be used.

    Args:
        base_url: of the endpoint, for the log.
        look: asks for its models; raises RemoteError while it cannot be used.
        authorization: what is sent as the key now; raises RemoteError when it cannot be read.
        first_retry_seconds: the pause before the endpoint is first asked; each further one is
            twice as long.
        max_retry_seconds: the longest pause.
        rng: spreads the pauses of many agents.

    Attributes:
        failure: why it cannot be used now; None while it can.
    """

    def __init__(
        self,
        base_url: str,
        look: Callable[[], Awaitable[Listing]],
        authorization: Callable[[], str],
        first_retry_seconds: float,
        max_retry_seconds: float,
        rng: random.Random,
    ) -> None:
        self._base_url = base_url
        self._look = look
        self._authorization = authorization
        self._first_retry_seconds = first_retry_seconds
        self._max_retry_seconds = max_retry_seconds
        self._rng = rng
        self._refused_key: str | None = None
        self._failures_in_a_row = 0
        self._recovery: asyncio.Task[None] | None = None
        self.failure: RemoteError | None = None

    def answered(self) -> None:
        """A request was answered, so the next failure is the first one again."""
        self._failures_in_a_row = 0

    def went_down(self, error: RemoteError) -> None:
        """The endpoint cannot be used now; it is asked until it can."""
        log.warning("remote.lost", base_url=self._base_url, issue=error.issue.value)
        self.failure = error
        self._refused_key = None
        if error.issue in _NEEDS_CHANGE:
            with contextlib.suppress(RemoteError):
                self._refused_key = self._authorization()
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(), name="remote-recovery")

    async def close(self) -> None:
        """Ask no more."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.cancel()
            await asyncio.gather(recovery, return_exceptions=True)

    async def _recover(self) -> None:
        """Ask a failed endpoint, with growing pauses, until it can be used."""
        went_down_at = time.monotonic()
        while True:
            # Not reset by coming back, only by an answer: an endpoint whose list of models works
            # and whose answers do not must not draw requests again and again.
            pause = self._first_retry_seconds * 2.0 ** min(self._failures_in_a_row, 16)
            self._failures_in_a_row += 1
            pause = min(pause, self._max_retry_seconds)
            await asyncio.sleep(pause * self._rng.uniform(0.8, 1.0))
            try:
                is_same_key = self._refused_key == self._authorization()
                is_early = time.monotonic() - went_down_at < self._max_retry_seconds
                if self._refused_key is not None and is_same_key and is_early:
                    continue
                await self._look()
            except RemoteError as error:
                self.failure = error
            else:
                self.failure = None
                log.info("remote.recovered", base_url=self._base_url)
                return
