"""One spawned child per loaded model: starts it, watches its progress, restarts it, stops it.

This module and what it imports stay light: llama.cpp and NumPy live in the child alone, and
unloading a model is ending its child, which gives all of its memory back.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final

import psutil
import structlog

from edge_agent.engine.base import (
    EngineSettings,
    EngineStats,
    Finished,
    GenerationEvent,
    GenerationRequest,
    LoadedModel,
    RejectedError,
    RejectionKind,
)
from edge_agent.engine.llama.child import Child, start_child
from edge_agent.engine.llama.failures import classify_exit, classify_refusal
from edge_agent.engine.llama.messages import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    Cancel,
    FromChild,
    Generate,
    LoadCommand,
    Loaded,
    LoadFailed,
    SlotGiven,
    Step,
    ToChild,
    decode_from_child,
    encode_to_child,
)
from edge_agent.engine.llama.preflight import check_file, check_settings
from edge_agent.engine.memory import available_bytes, largest_free_block_bytes, oom_kills
from edge_agent.engine.stream_buffer import MAX_UNREAD_CHARACTERS, StreamBuffer
from edge_agent.engine.validation import check_request
from edge_agent.errors import EngineError, EngineFailure

log = structlog.get_logger()

# An SD card in a Raspberry Pi reads some 40 MB a second; this leaves room for worse.
_LOAD_BASE_SECONDS: Final = 60.0
_SLOWEST_LOAD_BYTES_PER_SECOND: Final = 10_000_000.0
_LOGGED_LINES: Final = 10
"""Of a failed child's last words."""


@dataclass(slots=True)
class _Stream:
    request: GenerationRequest
    buffer: StreamBuffer
    has_slot: bool = False
    is_cancelling: bool = False


class SupervisedEngine:
    """An `InferenceEngine` whose model is loaded by llama.cpp in a child process.

    After a successful `load` the child is restarted whenever it dies or stops making progress,
    with growing pauses, until `close`. Meanwhile `stats().issue` says what happened and
    `generate` raises EngineError. A failed `load` is not repeated: it is for the caller to
    decide.

    Args:
        settings: how the model is run.
        niceness: added to the child's, so that the agent itself stays quick.
        max_queued: requests that may wait for a slot.
        stall_seconds: the child is killed when it has work and does nothing for so long.
        close_grace_seconds: how long the child may take to end when asked.
        first_restart_seconds: the pause before the first restart; each further one is twice as
            long.
        max_restart_seconds: the longest pause; a child that lived longer starts the count anew.
        memory_restart_seconds: the least pause after a want of memory, which ends by somebody
            else's giving some back, if at all.
        max_unread_characters: text that a reader may leave waiting before it is given up.
        available: memory that a new process can have, bytes.

    Raises:
        UsageError: a setting is out of its range.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        niceness: int = 5,
        max_queued: int = 256,
        stall_seconds: float = 60.0,
        close_grace_seconds: float = 1.0,
        first_restart_seconds: float = 1.0,
        max_restart_seconds: float = 60.0,
        memory_restart_seconds: float = 30.0,
        max_unread_characters: int = MAX_UNREAD_CHARACTERS,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        check_settings(settings)
        self.settings = settings
        self._niceness = niceness
        self._max_queued = max_queued
        self._stall_seconds = stall_seconds
        self._close_grace_seconds = close_grace_seconds
        self._first_restart_seconds = first_restart_seconds
        self._max_restart_seconds = max_restart_seconds
        self._memory_restart_seconds = memory_restart_seconds
        self._max_unread_characters = max_unread_characters
        self._available = available
        self._child: Child | None = None
        self._model: LoadedModel | None = None
        self._failure: EngineError | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_loading = False
        self._is_closed = False
        self._streams: dict[str, _Stream] = {}
        self._busy_seconds_before = 0.0
        self._busy_seconds = 0.0
        self._progressed_at = 0.0

    @property
    def child_pid(self) -> int | None:
        """The process id of the loaded child; None while there is none."""
        child = self._child
        return child.pid if child is not None and self._model is not None else None

    async def load(self) -> LoadedModel:
        """Start the child and load the model; see `InferenceEngine.load`.

        Raises:
            EngineError: it failed; the child is gone.
        """
        if self._is_closed:
            raise EngineError(EngineFailure.CRASHED, "The engine is closed; make a new one.")
        if self._model is not None:
            return self._model
        if self._is_loading or self._keeper is not None:
            raise EngineError(EngineFailure.CRASHED, "The model is being loaded already.")
        self._is_loading = True
        try:
            model = await self._start()
        finally:
            self._is_loading = False
        self._keeper = asyncio.create_task(self._keep(), name=f"engine-{self._name}")
        return model

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Generate one answer; see `InferenceEngine.generate`."""
        stream = self._submit(request)
        try:
            while True:
                event = await stream.buffer.get()
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            # Still ours unless the child has ended it: then nobody reads on.
            self._cancel(stream)

    async def cancel(self, key: str) -> None:
        """End a generation early; unknown keys are ignored."""
        stream = self._streams.get(key)
        if stream is not None:
            self._cancel(stream)

    def stats(self) -> EngineStats:
        """Look at the engine without waiting for it."""
        busy = sum(stream.has_slot for stream in self._streams.values())
        failure = self._failure
        return EngineStats(
            is_ready=self._model is not None and not self._is_closed,
            slots=self.settings.slots,
            busy_slots=busy,
            queued_requests=len(self._streams) - busy,
            busy_seconds_total=self._busy_seconds_before + self._busy_seconds,
            resident_bytes=_resident_bytes(self.child_pid),
            issue=self._issue(),
            failure=None if failure is None else failure.kind,
        )

    def _issue(self) -> str | None:
        failure = self._failure
        if failure is None:
            return None
        next_step = "" if self._keeper is None else " It is started again by itself."
        return f"engine_{failure.kind.value}: {failure}{next_step}"

    async def close(self) -> None:
        """End the child and give its memory back; running iterators end with EngineError."""
        self._is_closed = True
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
        child, self._child = self._child, None
        self._model = None
        self._end_streams(EngineError(EngineFailure.CRASHED, "The engine was closed."))
        if child is not None:
            await child.stop(self._close_grace_seconds)
        if keeper is not None:
            await asyncio.gather(keeper, return_exceptions=True)

    @property
    def _name(self) -> str:
        return self.settings.model_path.name

    def _submit(self, request: GenerationRequest) -> _Stream:
        check_request(request)
        if self._model is None or self._child is None:
            raise EngineError(
                EngineFailure.CRASHED if self._failure is None else self._failure.kind,
                "The model is not loaded now; try again later."
                if self._failure is None
                else f"The model is not loaded now: {self._failure}",
            )
        if request.key in self._streams:
            raise RejectedError(
                RejectionKind.INVALID_REQUEST, f"A request {request.key!r} is running already."
            )
        if not isinstance(request.prompt, str) and not self._model.has_chat_template:
            why = self._model.template_issue or "The model's file has no chat template."
            raise RejectedError(
                RejectionKind.NO_CHAT_TEMPLATE, f"{why} Send a raw prompt, or set a template."
            )
        if len(self._streams) >= self.settings.slots + self._max_queued:
            raise RejectedError(
                RejectionKind.QUEUE_FULL, f"{self._max_queued} requests are waiting already."
            )
        if not self._streams:
            self._progressed_at = time.monotonic()  # an idle child was not late
        stream = _Stream(request, StreamBuffer(self._max_unread_characters))
        self._streams[request.key] = stream
        self._tell(Generate(request))
        return stream

    def _cancel(self, stream: _Stream) -> None:
        """Ask the child to end a generation; the slot counts as busy until it has."""
        key = stream.request.key
        if self._streams.get(key) is stream and not stream.is_cancelling:
            stream.is_cancelling = True
            self._tell(Cancel(key))

    def _tell(self, message: ToChild) -> None:
        # Not drained: the child reads at once whatever it is doing, and `max_queued` bounds
        # what can be under way. A child that has just died is noticed by the keeper.
        if self._child is not None:
            self._child.stdin.write(encode_to_child(message))

    async def _start(self) -> LoadedModel:
        """Start a child and wait until it has loaded the model."""
        try:
            model = await self._load_in_child()
        except EngineError as error:
            self._failure = error
            raise
        self._failure = None
        return model

    async def _load_in_child(self) -> LoadedModel:
        file = await asyncio.to_thread(check_file, self.settings, self._available)
        deadline = self.settings.load_deadline_seconds
        if deadline is None:
            deadline = _LOAD_BASE_SECONDS + file.size_bytes / _SLOWEST_LOAD_BYTES_PER_SECOND
        kills_before = oom_kills()
        try:
            child = await start_child(["serve"], niceness=self._niceness)
        except OSError as error:
            raise EngineError(
                EngineFailure.CRASHED, f"The engine's process cannot be started: {error}."
            ) from error
        self._child = child
        is_loaded = False
        try:
            reply: FromChild | None = None
            if not self._is_closed:
                child.stdin.write(encode_to_child(LoadCommand(self.settings)))
                reply = await asyncio.wait_for(_read_message(child), timeout=deadline)
            if self._is_closed:
                raise EngineError(EngineFailure.CRASHED, "The engine was closed.")
            if isinstance(reply, LoadFailed):
                raise classify_refusal(
                    reply.kind, reply.message, child.stderr_tail, largest_free_block_bytes()
                )
            if not isinstance(reply, Loaded):
                status = await child.wait()
                raise _why(status, child, kills_before)
            is_loaded = True
        except asyncio.TimeoutError:
            raise EngineError(
                EngineFailure.LOAD_TIMEOUT,
                f"{self._name} was not loaded within {deadline:.0f} s;"
                " raise load_deadline_seconds or put the file on a faster disk.",
                child.stderr_tail,
            ) from None
        finally:
            if not is_loaded:
                if self._child is child:
                    self._child = None
                await child.stop()
        self._busy_seconds_before += self._busy_seconds
        self._busy_seconds = 0.0
        model = replace(reply.model, resident_bytes=_resident_bytes(child.pid))
        self._model = model
        return model

    async def _keep(self) -> None:
        """Serve children until the engine is closed, one after the other."""
        pause = self._first_restart_seconds
        while True:
            child = self._child
            if child is not None:
                started_at = time.monotonic()
                error = await self._serve(child)
                self._child = self._model = None
                self._failure = error
                self._end_streams(error)
                if time.monotonic() - started_at > self._max_restart_seconds:
                    pause = self._first_restart_seconds
                self._log_failure(error)
            if self._failure is not None and self._failure.kind.is_want_of_memory:
                pause = max(pause, self._memory_restart_seconds)
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._max_restart_seconds)
            try:
                await self._start()
            except EngineError as error:  # kept in self._failure
                self._log_failure(error)
            else:
                log.info("engine.restarted", model=self._name)

    def _log_failure(self, error: EngineError) -> None:
        log.warning(
            "engine.failed",
            model=self._name,
            kind=error.kind.value,
            reason=str(error),
            stderr_tail=error.stderr_tail.splitlines()[-_LOGGED_LINES:],
        )

    async def _serve(self, child: Child) -> EngineError:
        """Pass on what a loaded child says until it ends; why it ended."""
        kills_before = oom_kills()
        stall = asyncio.create_task(self._watch_progress(child), name=f"watch-{self._name}")
        fault: EngineError | None = None
        try:
            while True:
                message = await _read_message(child)
                if message is None:
                    break
                if not isinstance(message, Step):
                    raise ValueError(f"the child sent {type(message).__name__} in mid-stream")
                self._take_step(message)
        except ValueError as error:
            fault = EngineError(
                EngineFailure.CRASHED, f"The child sent nonsense: {error}.", child.stderr_tail
            )
        finally:
            stall.cancel()
            outcomes = await asyncio.gather(stall, return_exceptions=True)
            # After the end of its output a child has a moment to end by itself, so that its own
            # exit status is seen and not our signal.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.process.wait(), 1.0)
            status = await child.stop()
        if isinstance(outcomes[0], EngineError):
            return outcomes[0]
        return fault or _why(status, child, kills_before)

    async def _watch_progress(self, child: Child) -> EngineError:
        """Kill a child that has work and does nothing."""
        interval = self._stall_seconds / 8
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - slept_at > 2 * interval:
                # We did not run ourselves, in a frozen machine or behind a stopped clock, and
                # have yet to read what the child has said meanwhile.
                self._progressed_at = now
            silence = now - self._progressed_at
            if self._streams and silence > self._stall_seconds:
                child.signal(signal.SIGKILL)
                return EngineError(
                    EngineFailure.STALLED,
                    f"The engine made no progress for {silence:.0f} s and was stopped.",
                    child.stderr_tail,
                )

    def _take_step(self, step: Step) -> None:
        self._progressed_at = time.monotonic()
        self._busy_seconds = step.busy_seconds
        for key, event in step.events:
            stream = self._streams.get(key)
            if stream is None:
                continue
            if isinstance(event, SlotGiven):
                stream.has_slot = True
            elif isinstance(event, RejectedError):
                del self._streams[key]
                stream.buffer.fail(event)
            else:
                if isinstance(event, Finished):
                    del self._streams[key]
                if not stream.buffer.put(event):
                    self._cancel(stream)

    def _end_streams(self, error: EngineError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            # One exception a reader: raising an exception writes its traceback into it.
            stream.buffer.fail(EngineError(error.kind, str(error), error.stderr_tail))


async def _read_message(child: Child) -> FromChild | None:
    """The child's next message; None when it has closed its output.

    Raises:
        ValueError: it sent something else.
    """
    try:
        (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        return decode_from_child(await child.stdout.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _why(status: int, child: Child, kills_before: int | None) -> EngineError:
    """Why a child ended that nobody asked to."""
    kills = oom_kills()
    has_oom_kill = kills_before is not None and kills is not None and kills > kills_before
    return classify_exit(status, child.stderr_tail, has_oom_kill, largest_free_block_bytes())


def _resident_bytes(pid: int | None) -> int | None:
    if pid is None:
        return None
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
