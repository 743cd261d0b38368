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
    PrefixReuse,
    PromptProgress,
    RejectedError,
    RejectionKind,
    ResponseFormat,
    Sampling,
    StopReason,
    TextChunk,
)
from edge_agent.engine.llama.messages import Cancel, Generate, SlotGiven, Step, StepEvent
from edge_agent.engine.llama.scheduler import (
    Pace,
    StepPlan,
    WaitingSequence,
    admit,
    closing_move,
    plan_step,
)
from edge_agent.engine.llama.slots import SlotTable
from edge_agent.engine.prefixes import KeptSequence, TokenisedPrompt, choose_slot

# While text is held back there is nothing to tell but that work goes on, which the agent's
# watchdog wants to know.
_SILENCE_SECONDS: Final = 0.5

# A gap between busy slots often closes by itself, and closing it costs about two steps.
_GAP_STEPS: Final = 8


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
    # Whether a step that was aborted can be undone in every sequence.
    can_abort: bool

    def tokenise(self, prompt: str | Sequence[Message]) -> TokenisedPrompt:
        """The prompt's tokens as they are decoded, special tokens included.

        Raises:
            RejectedError: a chat that this model's template cannot render.
        """
        ...

    def grammar(self, wanted: ResponseFormat) -> str:
        """The grammar that keeps a format, known to be one that the sampler can use.

        Raises:
            RejectedError: there is none.
        """
        ...

    def decode(self, batch: Sequence[BatchToken], should_abort: Callable[[], bool] | None) -> bool:
        """Decode a batch in one call; False when `should_abort` ended it before it was done.

        After an abort the cache holds an unknown part of the batch: `truncate` mends it.
        """
        ...

    def start_sampling(self, slot: int, sampling: Sampling, grammar: str | None) -> None:
        """Give a slot a fresh sampler of its own."""
        ...

    def stop_sampling(self, slot: int) -> None:
        """Free a slot's sampler."""
        ...

    def sample(self, slot: int, batch_index: int) -> int:
        """Sample the token that follows one of the last batch's tokens.

        Raises:
            RejectedError: the slot's grammar allows no token of this vocabulary any more.
        """
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

    def can_cut(self, slot: int, length: int) -> bool:
        """Whether a slot's sequence can go on after its first `length` tokens, at least 1.

        Recurrent models only keep or forget all of one; sliding windows forget what has left them.
        """
        ...

    def swap(self, one: int, other: int) -> None:
        """Let two slots change places: their caches and their samplers."""
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
    prompt: TokenisedPrompt
    grammar: str | None
    arrived_at: float
    text: AnswerText
    started_at: float | None = None
    answer_started_at: float | None = None
    next_token: int = 0
    unsent_tokens: int = 0
    reused_tokens: int = 0
    answer: list[int] = field(default_factory=list)
    work_seconds: float = 0.0
    prefill_work_seconds: float = 0.0


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
        prefix_reuse: whose keys and values a request may start from.
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
        prefix_reuse: PrefixReuse = PrefixReuse.SYSTEM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._inbox = inbox
        self._send = send
        self._clock = clock
        self._share_ratio = cpu_share_ratio
        self._rest_ratio = (1.0 - cpu_share_ratio) / cpu_share_ratio
        self._table = SlotTable.empty(slots, context_tokens)
        self._waiting: collections.OrderedDict[str, WaitingSequence] = collections.OrderedDict()
        self._generations: dict[str, _Generation] = {}
        self._reuse = prefix_reuse
        self._kept: dict[int, KeptSequence] = {}
        self._kept_turns = 0
        self._gap_steps = 0
        self._has_postponed = False
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
            prompt = self._model.tokenise(request.prompt)
            length = len(prompt.tokens)
            if not length:
                raise RejectedError(RejectionKind.INVALID_REQUEST, "The prompt has no tokens.")
            if not self._table.fits(length):
                raise RejectedError(
                    RejectionKind.CONTEXT_EXCEEDED,
                    f"The prompt has {length} tokens; with its answer at most"
                    f" {self._table.context_tokens} fit.",
                )
            wanted = request.response_format
            grammar = None if wanted is None else self._model.grammar(wanted)
        except RejectedError as error:
            events.add(request.key, error)
            return
        key = request.key
        self._waiting[key] = WaitingSequence(key, length, request.sampling.max_tokens)
        text = AnswerText(request.sampling.stop)
        self._generations[key] = _Generation(request, prompt, grammar, arrived_at, text)

    def _cancel(self, key: str, events: _Events) -> None:
        if self._waiting.pop(key, None) is not None:
            self._finish(key, StopReason.CANCELLED, self._clock(), events)
            return
        for slot, sequence in self._table.active:
            if sequence.key == key:
                self._free(slot)
                self._finish(key, StopReason.CANCELLED, self._clock(), events)

    def _admit(self, started_at: float, events: _Events) -> None:
        """Give free slots to those who wait, each with as much in it as it may reuse."""

        def choose(key: str, free: Sequence[int]) -> tuple[int, int]:
            generation = self._generations[key]
            slot, reused = choose_slot(
                free,
                self._kept,
                generation.prompt,
                generation.request.session_id,
                reuse=self._reuse,
                can_cut=self._model.can_cut,
            )
            kept = self._kept.pop(slot, None)
            if kept is not None and reused < len(kept.tokens):
                self._model.truncate(slot, reused)
            return slot, reused

        self._table, admitted = admit(self._table, self._waiting.values(), choose)
        for key, slot in admitted:
            del self._waiting[key]
            generation = self._generations[key]
            generation.started_at = started_at
            generation.reused_tokens = self._table.occupant(slot).reused_tokens
            self._model.start_sampling(slot, generation.request.sampling, generation.grammar)
            events.add(key, SlotGiven())

    def _close_gap(self) -> None:
        """Move a sequence next to the others when a gap between them has stayed for a while."""
        move = closing_move(self._table)
        self._gap_steps = 0 if move is None else self._gap_steps + 1
        if move is None or self._gap_steps < _GAP_STEPS:
            return
        source, target = move
        self._model.swap(source, target)
        self._table = self._table.moved(source, target)
        kept = self._kept.pop(target, None)
        if kept is not None:
            self._kept[source] = kept

    def _decode_step(self, events: _Events) -> None:
        started_at = self._clock()
        self._admit(started_at, events)
        self._close_gap()
        # A prompt that is read beside a longer one waits for the whole step as a decoder does.
        has_decoders = len(self._table.active) > 1 or any(
            not sequence.is_reading for _, sequence in self._table.active
        )
        room = self._model.batch_tokens - len(self._table.sequences)
        budget = self._pace.budget(has_decoders, room, self._share_ratio)
        plan = plan_step(self._table, budget, can_postpone=not self._has_postponed)
        self._has_postponed = plan.has_postponed
        batch, outputs = self._batch_of(plan)
        reading = [self._table.occupant(prefill.slot).key for prefill in plan.prefills]

        def should_abort() -> bool:
            return self._inbox.is_cancelled(reading)

        # The look at each node of the graph costs a pure decode step several per cent, and such
        # a step is short anyway.
        can_abort = bool(reading) and self._model.can_abort
        is_done = self._model.decode(batch, should_abort if can_abort else None)
        ended: list[tuple[int, StopReason | RejectedError]] = []
        if is_done:
            for prefill in plan.prefills:
                self._table = self._table.read(prefill.slot, prefill.count)
                read = self._table.occupant(prefill.slot)
                events.add(read.key, PromptProgress(read.read_tokens, read.prompt_tokens))
            for slot, batch_index in outputs:
                reason: StopReason | RejectedError | None
                try:
                    token = self._model.sample(slot, batch_index)
                except RejectedError as error:
                    reason = error
                else:
                    reason = self._take_token(slot, token, events)
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
            if isinstance(reason, RejectedError):
                del self._generations[key]
                events.add(key, reason)
            else:
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
            tokens = self._generations[self._table.occupant(prefill.slot).key].prompt.tokens
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
        generation.answer.append(token)
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
            work_seconds = seconds * tokens / plan.tokens
            generation.work_seconds += work_seconds
            if slot not in plan.decodes:
                generation.prefill_work_seconds += work_seconds

    def _free(self, slot: int) -> None:
        """Free a slot; what is in its cache stays there for whoever may reuse it."""
        sequence = self._table.occupant(slot)
        generation = self._generations[sequence.key]
        self._model.stop_sampling(slot)
        if self._reuse is PrefixReuse.OFF or not sequence.cached_tokens:
            self._model.truncate(slot, 0)
        else:
            self._kept_turns += 1
            answered = max(0, sequence.answer_tokens - 1)  # the last token was never decoded
            self._kept[slot] = KeptSequence(
                [*generation.prompt.tokens[: sequence.read_tokens], *generation.answer[:answered]],
                generation.prompt.shared_tokens,
                generation.request.session_id,
                self._kept_turns,
            )
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
                prompt_tokens=len(generation.prompt.tokens),
                completion_tokens=len(generation.answer),
                queue_seconds=started - generation.arrived_at,
                prefill_seconds=answered - started,
                decode_seconds=now - answered,
                work_seconds=generation.work_seconds,
                cached_prompt_tokens=generation.reused_tokens,
                prefill_work_seconds=generation.prefill_work_seconds,
            ),
        )
