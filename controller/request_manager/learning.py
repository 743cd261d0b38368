"""Finished requests teach the quality store, off the event loop and in bounded numbers."""

import asyncio
import math
from typing import Final

import structlog

from controller.domain.completion import FinishReason
from controller.errors import InvalidRequestError
from controller.memory import release_freed_memory
from controller.predictors.serving import Outcome, QualityPredictor, destination_key
from controller.request_manager.records import RequestRecord, RequestState
from controller.storage.quality_files import QualityFilesError

log = structlog.get_logger()

_MAX_WAITING: Final = 4096
_MAX_AT_ONCE: Final = 64
_MAINTAIN_SECONDS: Final = 3600.0
_PAUSE_SECONDS: Final = 1.0
"""Outcomes gather this long, so that one write and one embedding call serve many."""

_TELLING: Final = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends that say how long the answer is, or at least was going to be."""


class Learner:
    """Hands outcomes to the predictor; belongs to the event loop.

    Args:
        predictor: None learns nothing, since there is no embedding model.
    """

    def __init__(self, predictor: QualityPredictor | None) -> None:
        self._predictor = predictor
        self._waiting: list[Outcome] = []
        self._arrived = asyncio.Event()
        self.dropped = 0

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
                "keep_prompts in [storage] does."
            )
        if self._predictor is None:
            raise InvalidRequestError(
                "This controller does not learn: it has no embedding model. Make one with "
                "`edge-controller embedding export` and start it anew."
            )
        self._put(self._outcome(record, score_ratio))

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

    def _put(self, outcome: Outcome) -> None:
        if self._predictor is None:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(outcome)
        self._arrived.set()

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
            await self.drain()

    async def drain(self) -> None:
        """Learn what waits now; also at the end, when nothing new comes."""
        loop = asyncio.get_running_loop()
        while self._predictor is not None and self._waiting:
            outcomes = self._waiting[:_MAX_AT_ONCE]
            await loop.run_in_executor(None, self._learn, self._predictor, outcomes)
            del self._waiting[: len(outcomes)]  # only now, so that a cancel loses nothing

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
    def _learn(predictor: QualityPredictor, outcomes: list[Outcome]) -> None:
        try:
            predictor.learn(outcomes)
        except QualityFilesError as error:
            log.error("quality.not_kept", outcomes=len(outcomes), error=str(error))
        except Exception:
            log.exception("quality.not_learned", outcomes=len(outcomes))
