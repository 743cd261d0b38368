"""Finished requests teach the quality store, off the event loop and in bounded numbers."""

import asyncio
import math
from typing import Final

import structlog

from controller.domain.completion import FinishReason
from controller.domain.request_record import RequestRecord, RequestState
from controller.errors import InvalidRequestError, QueueFullError
from controller.memory import release_freed_memory
from controller.quality.files import QualityFilesError
from controller.quality.predictor import Outcome, QualityPredictor, destination_key
from controller.telemetry.metrics import Metrics

log = structlog.get_logger()

_MAX_WAITING: Final = 4096
_MAX_AT_ONCE: Final = 64
_MAINTAIN_SECONDS: Final = 3600.0
_RETRY_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 1.0
"""Outcomes gather this long, so that one write and one embedding call serve many."""

_TELLING: Final = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends that say how long the answer is, or at least was going to be."""


class Learner:
    """Hands outcomes to the predictor; belongs to the event loop.

    While the disk takes nothing outcomes wait, and are tried again; only when too many wait are
    further ones dropped, counted and told.

    Args:
        predictor: None learns nothing, since there is no embedding model.

    Attributes:
        dropped: outcomes that found no room to wait.
    """

    def __init__(self, predictor: QualityPredictor | None) -> None:
        self._predictor = predictor
        self._waiting: list[Outcome] = []
        self._arrived = asyncio.Event()
        self._is_dropping = False
        self.dropped = 0

    def register_metrics(self, metrics: Metrics) -> None:
        """Register what waits, what was dropped and what is known."""
        metrics.gauge(
            "learning_waiting",
            "Outcomes that the quality store has not taken in yet.",
            lambda: self.waiting,
        )
        metrics.counter(
            "learning_dropped_outcomes",
            "Outcomes dropped because too many were waiting.",
            lambda: self.dropped,
        )
        metrics.gauge(
            "profiled_prompts",
            "Prompts in the quality store. No sample: there is no embedding model.",
            lambda: self.profiled_prompts,
        )

    @property
    def waiting(self) -> int:
        """Outcomes that are not learnt yet."""
        return len(self._waiting)

    @property
    def profiled_prompts(self) -> int | None:
        """Prompts that are known; None when nothing can be learnt."""
        return None if self._predictor is None else self._predictor.profiled_prompts

    def finished(self, record: RequestRecord) -> None:
        """Learn the length of an answer that the model or its limit ended."""
        account = record.account
        if account is None or account.completion.reason not in _TELLING:
            return
        self._put(self._outcome(record, None))

    def judged(self, record: RequestRecord, score_ratio: float) -> None:
        """Learn how good a finished answer was.

        Raises:
            InvalidRequestError: the score is outside 0 to 1, the request has not finished well, or
                this controller does not learn.
            QueueFullError: too many outcomes wait to be learnt.
        """
        if not 0 <= score_ratio <= 1:
            raise InvalidRequestError(f"score_ratio: 0 to 1, not {score_ratio:g}.")
        if record.state is not RequestState.COMPLETED or record.account is None:
            raise InvalidRequestError(
                f"Request {record.request.request_id!r} is {record.state.value}; only a completed "
                "one can be judged."
            )
        if not record.request.text:
            raise InvalidRequestError(
                f"The prompt of request {record.request.request_id!r} was not kept over a restart; "
                "set keep_prompts in [storage] to keep prompts."
            )
        if self._predictor is None:
            raise InvalidRequestError(
                "This controller does not learn: it has no embedding model. Make one with "
                "`edge-controller embedding export` and restart it."
            )
        if not self._put(self._outcome(record, score_ratio)):
            raise QueueFullError(
                "Too many scores are waiting; try again later. If it goes on, look for a full disk "
                "in the controller's log."
            )

    def _outcome(self, record: RequestRecord, score_ratio: float | None) -> Outcome:
        account = record.account
        assert account is not None  # both callers have looked
        reason = account.completion.reason
        return Outcome(
            record.request.text,
            destination_key(account.node_id, account.model),
            account.model,
            score_ratio,
            # The length was learnt when it finished; a score comes later.
            account.completion.usage.completion_tokens if score_ratio is None else None,
            was_cut=score_ratio is None and reason is FinishReason.LENGTH,
        )

    def _put(self, outcome: Outcome) -> bool:
        """Whether it will be learnt."""
        if self._predictor is None:
            return False
        if len(self._waiting) >= _MAX_WAITING:
            if not self._is_dropping:
                log.error("quality.outcomes_dropped", waiting=_MAX_WAITING, dropped=self.dropped)
            self._is_dropping = True
            self.dropped += 1
            return False
        self._is_dropping = False
        self._waiting.append(outcome)
        self._arrived.set()
        return True

    async def run(self) -> None:
        """Learn until cancelled."""
        maintained_at = -math.inf
        loop = asyncio.get_running_loop()
        while True:
            if self._predictor is not None and loop.time() - maintained_at > _MAINTAIN_SECONDS:
                await loop.run_in_executor(None, self._maintain, self._predictor)
                maintained_at = loop.time()
            try:  # what is too old goes although nothing new comes
                await asyncio.wait_for(self._arrived.wait(), _MAINTAIN_SECONDS)
            except asyncio.TimeoutError:
                continue
            await asyncio.sleep(_PAUSE_SECONDS)
            self._arrived.clear()
            if not await self.drain():
                await asyncio.sleep(_RETRY_SECONDS)
                self._arrived.set()

    async def drain(self) -> bool:
        """Learn what waits now; also at the end, when nothing new comes.

        Returns:
            False when the store could not be written; what was not learnt waits still.
        """
        loop = asyncio.get_running_loop()
        while self._predictor is not None and self._waiting:
            outcomes = self._waiting[:_MAX_AT_ONCE]
            if not await loop.run_in_executor(None, self._learn, self._predictor, outcomes):
                return False
            del self._waiting[: len(outcomes)]  # only now, so that a cancel loses nothing
        return True

    @staticmethod
    def _maintain(predictor: QualityPredictor) -> None:
        try:
            dropped = predictor.maintain()
            if dropped:
                log.info("quality.dropped", prompts=dropped, kept=predictor.profiled_prompts)
        except QualityFilesError as error:
            log.error("quality.not_maintained", error=str(error))
        except Exception:
            log.exception("quality.not_maintained")
        release_freed_memory()  # building an index takes as much again as the store

    @staticmethod
    def _learn(predictor: QualityPredictor, outcomes: list[Outcome]) -> bool:
        """Whether they need not be tried again."""
        try:
            predictor.learn(outcomes)
        except QualityFilesError as error:
            log.error("quality.not_kept", outcomes=len(outcomes), error=str(error))
            return False
        except Exception:
            log.exception("quality.not_learned", outcomes=len(outcomes))
        return True
