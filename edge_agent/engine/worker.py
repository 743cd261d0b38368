"""The loop of an engine's child: commands in, steps of continuous batching, events out.

It knows nothing of llama.cpp; a `TokenModel` does the decoding.
"""

import collections
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from edge_agent.engine.answer_text import AnswerText
from edge_agent.engine.base import (
    Finished,
    GenerationRequest,
    Message,
    PromptProgress,
    RejectedError,
    RejectionKind,
    Sampling,
    StopReason,
    TextChunk,
)
from edge_agent.engine.messages import Cancel, Generate, Started, Step, StepEvent
from edge_agent.engine.scheduler import Pace, StepPlan, Waiting, admit, plan_step
from edge_agent.engine.slots import SlotTable

# While text is held back there is nothing to tell but that work goes on, which the agent's
# watchdog wants to know.
_SILENCE_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class BatchToken:
    """One token of a batch.

    Attributes:
        position: in its sequence, from 0.
        wants_logits: whether a token will be sampled after it.
    """

    token: int
    position: int
    slot: int
    wants_logits: bool


class TokenModel(Protocol):
    """A loaded model seen as tokens; one thread uses it."""

    batch_tokens: int

    def tokenise(self, prompt: str | Sequence[Message]) -> list[int]:
        """The prompt's tokens as they are decoded, special tokens included.

        Raises:
            RejectedError: a chat that this model's template cannot render.
        """
        ...

    def decode(self, batch: Sequence[BatchToken], should_abort: Callable[[], bool] | None) -> bool:
        """Decode a batch in one call; False when `should_abort` ended it before it was done.

        After an abort the cache holds an unknown part of the batch: `truncate` mends it.
        """
        ...

    def start_sampling(self, slot: int, sampling: Sampling) -> None:
        """Give a slot a fresh sampler of its own."""
        ...

    def sample(self, slot: int, batch_index: int) -> int:
        """Sample the token that follows one of the last batch's tokens."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether this token ends an answer."""
        ...

    def piece(self, token: int) -> bytes:
        """The token's bytes; may be part of a character; none for control tokens."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything in a slot's cache from this position on."""
        ...


class Inbox:
    """Commands from the reading thread to the decoding one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._commands: collections.deque[tuple[float, Generate | Cancel]] = collections.deque()
        self._cancelled: set[str] = set()
        self._changed = threading.Condition()

    def put(self, command: Generate | Cancel) -> None:
        """Add a command, with the time of its arrival."""
        with self._changed:
            self._commands.append((self._clock(), command))
            if isinstance(command, Cancel):
                self._cancelled.add(command.key)
            self._changed.notify()

    def wait(self, seconds: float | None) -> None:
        """Return when a command is there or the time has passed; None waits for ever."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands), seconds)

    def take(self) -> list[tuple[float, Generate | Cancel]]:
        """Every command that has come since, with its time of arrival."""
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
            self._cancelled.clear()
            return commands

    def is_cancelled(self, keys: Iterable[str]) -> bool:
        """Whether a cancel for one of these is waiting to be taken."""
        return not self._cancelled.isdisjoint(keys)


@dataclass(slots=True)
class _Generation:
    """What the worker knows of a request besides its slot."""

    request: GenerationRequest
    tokens: list[int]
    arrived_at: float
    text: AnswerText
    started_at: float | None = None
    answer_started_at: float | None = None
    next_token: int = 0
    unsent_tokens: int = 0
    answer_tokens: int = 0
    work_seconds: float = 0.0


@dataclass(slots=True)
class _Events:
    """What one step brought about."""

    items: list[tuple[str, StepEvent]] = field(default_factory=list)

    def add(self, key: str, event: StepEvent) -> None:
        self.items.append((key, event))


class Worker:
    """Drives one model over its slots.

    Args:
        model: does the decoding.
        inbox: where commands come from.
        send: takes the message of each step; may block, which slows the worker down.
        slots: sequences decoded at once.
        context_tokens: of one sequence.
        cpu_share_ratio: of the time, spent decoding; the rest is rest.
        clock: monotonic seconds; the inbox's.
    """

    def __init__(
        self,
        model: TokenModel,
        inbox: Inbox,
        send: Callable[[Step], None],
        *,
        slots: int,
        context_tokens: int,
        cpu_share_ratio: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._inbox = inbox
        self._send = send
        self._clock = clock
        self._share_ratio = cpu_share_ratio
        self._rest_ratio = (1.0 - cpu_share_ratio) / cpu_share_ratio
        self._table = SlotTable.empty(slots, context_tokens)
        self._waiting: collections.OrderedDict[str, Waiting] = collections.OrderedDict()
        self._generations: dict[str, _Generation] = {}
        self._pace = Pace()
        self._busy_seconds = 0.0
        self._rests_until = 0.0
        self._sent_at = 0.0

    def run(self) -> None:
        """Work until the process ends."""
        while True:
            self._inbox.wait(self.seconds_to_next_step())
            self.step()

    def seconds_to_next_step(self) -> float | None:
        """How long nothing happens unless a command comes; None when only that can help."""
        if not self._generations:
            return None
        return max(0.0, self._rests_until - self._clock())

    def step(self) -> None:
        """Take the commands that have come and, unless resting, decode one batch."""
        events = _Events()
        for arrived_at, command in self._inbox.take():
            if isinstance(command, Cancel):
                self._cancel(command.key, events)
            else:
                self._accept(command.request, arrived_at, events)
        if self._generations and self._clock() >= self._rests_until:
            self._decode_step(events)
        now = self._clock()
        if events.items or (self._generations and now - self._sent_at > _SILENCE_SECONDS):
            self._sent_at = now
            self._send(Step(tuple(events.items), self._busy_seconds))

    def _accept(self, request: GenerationRequest, arrived_at: float, events: _Events) -> None:
        try:
            tokens = self._model.tokenise(request.prompt)
            if not tokens:
                raise RejectedError(RejectionKind.INVALID_REQUEST, "The prompt has no tokens.")
            if not self._table.fits(len(tokens)):
                raise RejectedError(
                    RejectionKind.CONTEXT_EXCEEDED,
                    f"The prompt has {len(tokens)} tokens; with its answer at most"
                    f" {self._table.context_tokens} fit.",
                )
        except RejectedError as error:
            events.add(request.key, error)
            return
        key = request.key
        self._waiting[key] = Waiting(key, len(tokens), request.sampling.max_tokens)
        text = AnswerText(request.sampling.stop)
        self._generations[key] = _Generation(request, tokens, arrived_at, text)

    def _cancel(self, key: str, events: _Events) -> None:
        if self._waiting.pop(key, None) is not None:
            self._finish(key, StopReason.CANCELLED, self._clock(), events)
            return
        for slot, sequence in self._table.active:
            if sequence.key == key:
                self._free(slot)
                self._finish(key, StopReason.CANCELLED, self._clock(), events)

    def _decode_step(self, events: _Events) -> None:
        started_at = self._clock()
        self._table, admitted = admit(self._table, self._waiting.values())
        for key, slot in admitted:
            del self._waiting[key]
            generation = self._generations[key]
            generation.started_at = started_at
            self._model.start_sampling(slot, generation.request.sampling)
            events.add(key, Started())
        has_decoders = any(not sequence.is_reading for _, sequence in self._table.active)
        room = self._model.batch_tokens - len(self._table.sequences)
        budget = self._pace.budget(has_decoders, room, self._share_ratio)
        plan = plan_step(self._table, budget)
        batch, outputs = self._batch_of(plan)
        reading = [self._table.occupant(prefill.slot).key for prefill in plan.prefills]

        def should_abort() -> bool:
            return self._inbox.is_cancelled(reading)

        # The look at each node of the graph costs a pure decode step several per cent, and such
        # a step is short anyway.
        is_done = self._model.decode(batch, should_abort if reading else None)
        ended: list[tuple[int, StopReason]] = []
        if is_done:
            for prefill in plan.prefills:
                self._table = self._table.read(prefill.slot, prefill.count)
                read = self._table.occupant(prefill.slot)
                events.add(read.key, PromptProgress(read.read_tokens, read.prompt_tokens))
            for slot, batch_index in outputs:
                reason = self._take_token(slot, self._model.sample(slot, batch_index), events)
                if reason is not None:
                    ended.append((slot, reason))
        else:
            # What was decoded counts for nobody: the step is planned anew without the cancelled.
            for slot, sequence in self._table.active:
                self._model.truncate(slot, sequence.cached_tokens)
        now = self._clock()
        self._account(plan, now - started_at)
        for slot, reason in ended:
            key = self._table.occupant(slot).key
            self._free(slot)
            self._finish(key, reason, now, events)
        if is_done and plan.prefills:
            self._pace = self._pace.after(plan.tokens, now - started_at)
        self._rests_until = now + (now - started_at) * self._rest_ratio

    def _batch_of(self, plan: StepPlan) -> tuple[list[BatchToken], list[tuple[int, int]]]:
        """The batch, and (slot, index in the batch) of every token that is followed by one."""
        batch: list[BatchToken] = []
        outputs: list[tuple[int, int]] = []
        for slot in plan.decodes:
            sequence = self._table.occupant(slot)
            outputs.append((slot, len(batch)))
            token = self._generations[sequence.key].next_token
            batch.append(BatchToken(token, sequence.cached_tokens, slot, True))
        for prefill in plan.prefills:
            tokens = self._generations[self._table.occupant(prefill.slot).key].tokens
            end = prefill.start + prefill.count
            batch.extend(
                BatchToken(tokens[position], position, prefill.slot, False)
                for position in range(prefill.start, end)
            )
            if prefill.is_last:
                batch[-1] = BatchToken(tokens[end - 1], end - 1, prefill.slot, True)
                outputs.append((prefill.slot, len(batch) - 1))
        return batch, outputs

    def _take_token(self, slot: int, token: int, events: _Events) -> StopReason | None:
        """Count a sampled token and show its text; why the answer ends, if it does."""
        self._table = self._table.answer(slot)
        sequence = self._table.occupant(slot)
        generation = self._generations[sequence.key]
        if generation.answer_started_at is None:
            generation.answer_started_at = self._clock()
        generation.answer_tokens += 1
        generation.unsent_tokens += 1
        generation.next_token = token
        is_end = self._model.is_end(token)
        shown = "" if is_end else generation.text.feed(self._model.piece(token))
        reason: StopReason | None = None
        if is_end or generation.text.is_stopped:
            reason = StopReason.STOP
        elif sequence.is_full:
            reason = StopReason.LENGTH
        if reason is not None:
            shown += generation.text.finish()
        if shown:
            events.add(sequence.key, TextChunk(shown, generation.unsent_tokens))
            generation.unsent_tokens = 0
        return reason

    def _account(self, plan: StepPlan, seconds: float) -> None:
        """Share a step's time among its sequences by their tokens."""
        self._busy_seconds += seconds
        shares = dict.fromkeys(plan.decodes, 1)
        for prefill in plan.prefills:
            shares[prefill.slot] = prefill.count
        for slot, tokens in shares.items():
            generation = self._generations[self._table.occupant(slot).key]
            generation.work_seconds += seconds * tokens / plan.tokens

    def _free(self, slot: int) -> None:
        self._model.truncate(slot, 0)
        self._table = self._table.release(slot)

    def _finish(self, key: str, reason: StopReason, now: float, events: _Events) -> None:
        generation = self._generations.pop(key)
        started = now if generation.started_at is None else generation.started_at
        answered = generation.answer_started_at
        answered = now if answered is None else answered
        events.add(
            key,
            Finished(
                reason=reason,
                prompt_tokens=len(generation.tokens),
                completion_tokens=generation.answer_tokens,
                queue_seconds=started - generation.arrived_at,
                prefill_seconds=answered - started,
                decode_seconds=now - answered,
                work_seconds=generation.work_seconds,
            ),
        )
