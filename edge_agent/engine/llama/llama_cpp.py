"""The child process, the only one with llama.cpp in it.

Run as `python -m edge_agent.engine.llama.llama_cpp [--parent=PID] [--nice=N] COMMAND ...`:

    serve                                          decodes what standard input asks for
    quantise SOURCE TARGET QUANTISATION THREADS    writes another quantisation of a file

Nothing here is imported by the agent's own process.
"""

import argparse
import collections
import contextlib
import ctypes
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import llama_cpp

from edge_agent.engine.base import (
    EngineSettings,
    LoadedModel,
    Message,
    RejectedError,
    RejectionKind,
    ResponseFormat,
    Sampling,
)
from edge_agent.engine.llama.chat_template import ChatTemplate, TemplateError
from edge_agent.engine.llama.grammar import grammar_of
from edge_agent.engine.llama.grammar_probe import TooLongError, survives
from edge_agent.engine.llama.messages import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    Cancel,
    FromChild,
    Generate,
    LoadCommand,
    Loaded,
    LoadFailed,
    decode_to_child,
    encode_from_child,
)
from edge_agent.engine.llama.sampling import AnswerSampler
from edge_agent.engine.llama.special_texts import SpecialTexts
from edge_agent.engine.llama.worker import BatchToken, Inbox, Worker
from edge_agent.engine.prefixes import TokenisedPrompt, common_prefix
from edge_agent.errors import EngineFailure

BATCH_TOKENS: Final = 512
_PR_SET_PDEATHSIG: Final = 1
_LOG_WARN: Final = 3
_LOG_ERROR: Final = 4
_LOG_CONT: Final = 5
_DECODED: Final = 0
_ABORTED: Final = 2
_KNOWN_GRAMMARS: Final = 64

# Plain English of our own, for the mean length of a token.
ENGLISH_SAMPLE: Final = (
    "The harbour was quiet when the first boats came back. Two of them had been out all night,"
    " and their crews stood on deck with cold hands, looking for the lights of the town. On the"
    " quay a woman was counting crates: eleven of herring, four of crab, and one that nobody"
    " wanted to open. She wrote the numbers down, closed the book, and asked the youngest of the"
    " men whether the weather would hold until Thursday. He thought so. The wind had turned to"
    " the west in the early morning, the barometer was rising slowly, and the gulls, which are"
    " seldom wrong about such things, had gone far out to sea again."
)


class LoadError(Exception):
    """A model could not be loaded; `kind` says how."""

    def __init__(self, kind: EngineFailure, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Log:
    """llama.cpp's log: warnings and worse to standard error, errors kept for a while."""

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=20)
        self._level = 0
        # llama.cpp keeps the bare pointer; without this reference it would call freed memory.
        self._callback = llama_cpp.llama_log_callback(self._take)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, _data: object) -> None:
        if level != _LOG_CONT:
            self._level = level
        if self._level < _LOG_WARN:
            return
        line = text.decode(errors="replace")
        if self._level >= _LOG_ERROR and line.strip():
            self.errors.append(line.strip())
        sys.stderr.write(line)
        sys.stderr.flush()


_log: _Log | None = None


def _start_backend() -> _Log:
    """Set llama.cpp up, once in a process."""
    global _log
    if _log is None:
        _log = _Log()
        llama_cpp.llama_backend_init()
    return _log


class LlamaModel:
    """A loaded model with one context whose sequences are the engine's slots.

    One thread uses it. It is freed with its process.

    Raises:
        LoadError: it could not be loaded.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.batch_tokens = BATCH_TOKENS
        log = _start_backend()
        log.errors.clear()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = settings.gpu_layers
        self._model: Any = llama_cpp.llama_model_load_from_file(
            os.fsencode(settings.model_path), parameters
        )
        if not self._model:
            raise _load_error(log.errors)
        self._vocab: Any = llama_cpp.llama_model_get_vocab(self._model)
        trained = int(llama_cpp.llama_model_n_ctx_train(self._model))
        self.context_tokens = min(settings.context_tokens, trained or settings.context_tokens)
        self.slots = settings.slots
        self._context: Any = llama_cpp.llama_init_from_model(self._model, self._wishes(settings))
        if not self._context:
            raise _load_error(log.errors)
        if llama_cpp.llama_n_ctx_seq(self._context) < self.context_tokens:
            raise LoadError(
                EngineFailure.CRASHED, "llama.cpp gave each sequence less context than asked for."
            )
        self._memory: Any = llama_cpp.llama_get_memory(self._context)
        self._batch: Any = llama_cpp.llama_batch_init(self.batch_tokens, 0, 1)
        self._samplers: dict[int, AnswerSampler] = {}
        # Recurrent state cannot be taken apart again.
        self._is_recurrent = bool(
            llama_cpp.llama_model_is_recurrent(self._model)
            or llama_cpp.llama_model_is_hybrid(self._model)
        )
        self.can_abort = not self._is_recurrent and self._has_whole_windows()
        # Grammars that have been tried; llama.cpp's reason for each that it refused.
        self._known_grammars: collections.OrderedDict[str, str | None] = collections.OrderedDict()
        self._abort_callback: Any = None
        self._piece_buffer = ctypes.create_string_buffer(256)
        self.set_template(settings.chat_template)
        self._warm_up()

    def _wishes(self, settings: EngineSettings) -> Any:
        wishes = llama_cpp.llama_context_default_params()
        # Separate caches of equal size: measured faster than one unified cache, and no sequence
        # can take another one's cells. llama.cpp pads each to 256 cells; we hold to our limit.
        wishes.kv_unified = False
        wishes.n_seq_max = settings.slots
        wishes.n_ctx = settings.slots * -(-self.context_tokens // 256) * 256
        wishes.n_batch = self.batch_tokens
        wishes.n_ubatch = self.batch_tokens
        # One output a sequence, not one a token: with Gemma's vocabulary of 262,144 the default
        # reserves half a gigabyte for logits that are never asked for.
        wishes.n_outputs_max = settings.slots
        wishes.n_threads = settings.threads
        wishes.n_threads_batch = settings.threads
        wishes.swa_full = self._has_whole_windows()
        wishes.no_perf = True
        return wishes

    def _has_whole_windows(self) -> bool:
        """Whether layers with a sliding window keep every token.

        They do where it costs nothing. Elsewhere they forget what has left their window, so that
        a sequence can be cut back only as far as its window is still there.
        """
        window = int(llama_cpp.llama_model_n_swa(self._model))
        return window == 0 or self.context_tokens <= window + self.batch_tokens

    def set_template(self, override: str | None) -> None:
        """Use this chat template from now on; None uses the file's own."""
        self._template: ChatTemplate | None = None
        self.template_issue: str | None = None
        source = override
        if source is None:
            raw = llama_cpp.llama_model_chat_template(self._model, None)
            source = raw.decode(errors="replace") if raw else None
        if source is None:
            return
        bos = self._token_text(llama_cpp.llama_vocab_bos(self._vocab))
        eos = self._token_text(llama_cpp.llama_vocab_eos(self._vocab))
        try:
            self._template = ChatTemplate(source, bos, eos)
        except TemplateError as error:
            self.template_issue = str(error)
            return
        hidden = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        self._special = SpecialTexts(
            self._token_text(token)
            for token in range(llama_cpp.llama_vocab_n_tokens(self._vocab))
            if llama_cpp.llama_vocab_get_attr(self._vocab, token) & hidden
        )

    def _token_text(self, token: int) -> str:
        if token < 0:
            return ""
        return str(llama_cpp.llama_vocab_get_text(self._vocab, token).decode(errors="replace"))

    def _warm_up(self) -> None:
        """Decode once: pages the weights in, and meets an illegal instruction now."""
        token = max(0, llama_cpp.llama_vocab_bos(self._vocab))
        self.decode([BatchToken(token, 0, 0, True)], None)
        self.truncate(0, 0)

    def describe(self) -> LoadedModel:
        """What the agent is told about the loaded model."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self._model, buffer, 256)
        sample_tokens = self._encode(ENGLISH_SAMPLE)
        return LoadedModel(
            context_tokens=self.context_tokens,
            slots=self.slots,
            has_chat_template=self._template is not None,
            template_issue=self.template_issue,
            description=buffer.value.decode(errors="replace"),
            parameters=int(llama_cpp.llama_model_n_params(self._model)) or None,
            characters_per_token=len(ENGLISH_SAMPLE) / len(sample_tokens)
            if sample_tokens
            else None,
            engine_version=f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}",
            resident_bytes=None,
            supports_response_format=True,
        )

    def tokenise(self, prompt: str | Sequence[Message]) -> TokenisedPrompt:
        """See `TokenModel.tokenise`.

        The markers of a template count in a raw prompt, which is written by somebody who knows
        them, and not in a chat's messages, which may come from anybody.
        """
        if isinstance(prompt, str):
            return TokenisedPrompt(self._with_bos(self._encode(prompt)))
        tokens = self._chat_tokens(prompt)
        return TokenisedPrompt(tokens, self._shared_tokens(prompt, tokens))

    def render(self, chat: Sequence[Message]) -> str:
        """The text that the template makes of a chat, markers and all.

        Raises:
            TemplateError: there is no template, or it refuses the chat.
        """
        if self._template is None:
            raise TemplateError("There is no chat template.")
        return self._template.render(chat)

    def _chat_tokens(self, chat: Sequence[Message]) -> list[int]:
        if self._template is None:
            why = self.template_issue or "The model's file has no chat template."
            raise RejectedError(
                RejectionKind.NO_CHAT_TEMPLATE, f"{why} Send a raw prompt, or set a template."
            )
        try:
            pieces = self._template.pieces(chat, self._special)
        except TemplateError as error:
            raise RejectedError(RejectionKind.INVALID_REQUEST, str(error)) from error
        tokens: list[int] = []
        for piece in pieces:
            tokens += self._encode(piece.text, parse_special=not piece.is_plain)
        return self._with_bos(tokens)

    def _shared_tokens(self, chat: Sequence[Message], tokens: Sequence[int]) -> int:
        """How many tokens come before what the first turn that is not the system's says."""
        count = next((at for at, turn in enumerate(chat) if turn.role != "system"), len(chat))
        if count == len(chat):
            return 0
        # What changes when that turn begins otherwise is not shared.
        first = chat[count]
        other = "0" if not first.content.startswith("0") else "1"
        try:
            changed = self._chat_tokens((*chat[:count], Message(first.role, other)))
        except RejectedError:  # a template may want more turns than these
            return 0
        return common_prefix(tokens, changed)

    def _with_bos(self, tokens: list[int]) -> list[int]:
        # Added here and not by the tokenizer: a template may have written the token already,
        # and some vocabularies would also end the prompt with a token that ends the answer.
        bos = llama_cpp.llama_vocab_bos(self._vocab)
        if llama_cpp.llama_vocab_get_add_bos(self._vocab) and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return tokens

    def _encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        while True:
            tokens = (llama_cpp.llama_token * room)()
            count = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), tokens, room, False, parse_special
            )
            if count >= 0:
                return list(tokens[:count])
            room = -count

    def decode(self, batch: Sequence[BatchToken], should_abort: Callable[[], bool] | None) -> bool:
        """See `TokenModel.decode`."""
        raw = self._batch
        for index, item in enumerate(batch):
            raw.token[index] = item.token
            raw.pos[index] = item.position
            raw.n_seq_id[index] = 1
            raw.seq_id[index][0] = item.slot
            raw.logits[index] = item.wants_logits
        raw.n_tokens = len(batch)
        self._set_abort(should_abort)
        status = llama_cpp.llama_decode(self._context, raw)
        if status == _ABORTED and should_abort is not None:
            return False
        if status != _DECODED:
            raise RuntimeError(f"llama_decode answered {status} to {len(batch)} tokens")
        llama_cpp.llama_synchronize(self._context)
        return True

    def _set_abort(self, should_abort: Callable[[], bool] | None) -> None:
        if should_abort is None:
            if self._abort_callback is None:
                return
            callback = llama_cpp.ggml_abort_callback()  # NULL
        else:
            callback = llama_cpp.ggml_abort_callback(lambda _data: should_abort())
        llama_cpp.llama_set_abort_callback(self._context, callback, None)
        # Kept as long as llama.cpp has its address.
        self._abort_callback = callback if should_abort is not None else None

    def logits(self, batch_index: int) -> list[float]:
        """float[V]; what the last batch says about the token after one of its tokens."""
        count = llama_cpp.llama_vocab_n_tokens(self._vocab)
        row = llama_cpp.llama_get_logits_ith(self._context, batch_index)
        return list(row[:count])

    def grammar(self, wanted: ResponseFormat) -> str:
        """See `TokenModel.grammar`."""
        text = grammar_of(wanted)
        if text in self._known_grammars:
            self._known_grammars.move_to_end(text)
        else:
            self._known_grammars[text] = self._grammar_fault(text)
            if len(self._known_grammars) > _KNOWN_GRAMMARS:
                self._known_grammars.popitem(last=False)
        fault = self._known_grammars[text]
        if fault is not None:
            raise RejectedError(
                RejectionKind.INVALID_REQUEST, f"The grammar cannot be used: {fault}."
            )
        return text

    def _grammar_fault(self, text: str) -> str | None:
        """Why llama.cpp cannot use a grammar; None when it can."""

        def attempt() -> bool:
            return bool(self._new_grammar(text))

        try:
            is_good, said = survives(attempt)
        except TooLongError:
            return "it takes too long to read; make it less ambiguous"
        except OSError as error:
            return f"there is no memory to try it out now ({error})"
        if is_good:
            return None
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        if not lines:
            return "it is nested too deeply, or in a way that llama.cpp cannot read"
        return lines[0].removeprefix("parse: ").removesuffix(".")[:200]

    def _new_grammar(self, text: str) -> Any:
        return llama_cpp.llama_sampler_init_grammar(self._vocab, text.encode(), b"root")

    def start_sampling(self, slot: int, sampling: Sampling, grammar: str | None) -> None:
        """See `TokenModel.start_sampling`."""
        self.stop_sampling(slot)
        self._samplers[slot] = AnswerSampler(
            sampling,
            llama_cpp.llama_vocab_n_tokens(self._vocab),
            None if grammar is None else self._new_grammar(grammar),
        )

    def stop_sampling(self, slot: int) -> None:
        """See `TokenModel.stop_sampling`."""
        sampler = self._samplers.pop(slot, None)
        if sampler is not None:
            sampler.free()

    def sample(self, slot: int, batch_index: int) -> int:
        """See `TokenModel.sample`."""
        return self._samplers[slot].sample(self._context, batch_index)

    def is_end(self, token: int) -> bool:
        """See `TokenModel.is_end`."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def piece(self, token: int) -> bytes:
        """See `TokenModel.piece`."""
        buffer = self._piece_buffer
        while True:
            length = llama_cpp.llama_token_to_piece(
                self._vocab, token, buffer, len(buffer), 0, False
            )
            if length >= 0:
                return buffer.raw[:length]
            self._piece_buffer = buffer = ctypes.create_string_buffer(-length)

    def truncate(self, slot: int, length: int) -> None:
        """See `TokenModel.truncate`."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, slot, length, -1):
            raise RuntimeError(f"sequence {slot} cannot be cut back to {length} tokens")

    def can_cut(self, slot: int, length: int) -> bool:
        """See `TokenModel.can_cut`."""
        last = int(llama_cpp.llama_memory_seq_pos_max(self._memory, slot))
        if length == last + 1:
            return True
        if self._is_recurrent:
            return False
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, slot))
        window = int(llama_cpp.llama_model_n_swa(self._model))
        return first == 0 or first <= length - window

    def swap(self, one: int, other: int) -> None:
        """See `TokenModel.swap`.

        Through this process's memory: llama.cpp puts a copy between sequences off until the next
        step, when the source may hold something else.
        """
        saved = [(slot, self._saved(slot)) for slot in (one, other)]
        for slot, _ in saved:
            self.truncate(slot, 0)
        for (slot, _), (_, state) in zip(saved, reversed(saved), strict=True):
            if state is not None and not llama_cpp.llama_state_seq_set_data(
                self._context, state, len(state), slot
            ):
                raise RuntimeError(f"sequence {slot} cannot be restored")
        samplers = [self._samplers.pop(slot, None) for slot in (one, other)]
        for slot, sampler in zip((other, one), samplers, strict=True):
            if sampler is not None:
                self._samplers[slot] = sampler

    def _saved(self, slot: int) -> Any:
        """A slot's cache as bytes; None when it is empty."""
        if llama_cpp.llama_memory_seq_pos_max(self._memory, slot) < 0:
            return None
        size = llama_cpp.llama_state_seq_get_size(self._context, slot)
        state = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self._context, state, size, slot) != size:
            raise RuntimeError(f"sequence {slot} cannot be saved")
        return state


def _load_error(errors: Sequence[str]) -> LoadError:
    """Classify a failed load by what llama.cpp logged, since it returns nothing but NULL."""
    text = "\n".join(errors)
    last = errors[-1] if errors else "llama.cpp gave no reason"
    if "unknown model architecture" in text or "unknown pre-tokenizer" in text:
        return LoadError(
            EngineFailure.UNSUPPORTED_ARCHITECTURE,
            f"This llama.cpp does not know the model's architecture; upgrade it: {last}.",
        )
    if "alloc" in text or "out of memory" in text:
        return LoadError(
            EngineFailure.OUT_OF_MEMORY,
            f"The model does not fit in memory; use fewer slots, a shorter context or a smaller"
            f" quantisation: {last}.",
        )
    return LoadError(EngineFailure.BAD_MODEL_FILE, f"llama.cpp cannot load the file: {last}.")


def _die_with_parent(parent: int | None) -> None:
    """Ask the kernel to kill this process when its parent ends, whatever the reason."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had gone before we asked
        os._exit(0)


def _be_the_first_to_go() -> None:
    """Let the kernel choose this process, not the agent, when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take standard input and output for ourselves.

    Whatever a library prints to standard output goes to standard error from here on, so that it
    cannot end up between our messages.

    Returns:
        the stream from the parent, the stream to the parent.
    """
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return source, sink


def _read_frame(source: BinaryIO) -> bytes | None:
    """One frame's bytes; None when the parent has closed the stream."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"the agent sent a message of {length} bytes")
    data = source.read(length)
    return data if len(data) == length else None


def _watch_parent(source: BinaryIO) -> None:
    """End this process when the stream from the parent ends."""

    def watch() -> None:
        while source.read(1):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _read_commands(source: BinaryIO, inbox: Inbox) -> None:
    """Pass the agent's commands on; a closed stream or nonsense ends the process at once."""

    def read() -> None:
        try:
            while (frame := _read_frame(source)) is not None:
                command = decode_to_child(frame)
                if not isinstance(command, Generate | Cancel):
                    raise TypeError(f"the agent sent {type(command).__name__} after the start")
                inbox.put(command)
        except Exception:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()


def _serve(source: BinaryIO, sink: BinaryIO) -> int:
    """Load the model that the first message names, and decode until the process ends."""

    def send(message: FromChild) -> None:
        data = memoryview(encode_from_child(message))
        while data:  # an unbuffered pipe may take less than it is given
            data = data[sink.write(data) :]

    frame = _read_frame(source)
    if frame is None:
        return 0
    command = decode_to_child(frame)
    if not isinstance(command, LoadCommand):
        raise TypeError(f"the agent began with {type(command).__name__}")
    inbox = Inbox()
    _read_commands(source, inbox)  # started now, since a long load must end with the agent too
    try:
        model = LlamaModel(command.settings)
    except LoadError as error:
        send(LoadFailed(error.kind, str(error)))
        return 1
    worker = Worker(
        model,
        inbox,
        send,
        slots=model.slots,
        context_tokens=model.context_tokens,
        cpu_share_ratio=command.settings.cpu_share_ratio,
        prefix_reuse=command.settings.prefix_reuse,
    )
    send(Loaded(model.describe()))
    worker.run()
    return 0


def _quantise(source: Path, target: Path, quantisation: str, threads: int) -> int:
    """Write another quantisation and see it on the disk; the exit status is the answer."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quantisation}")
    parameters.nthread = threads
    parameters.allow_requantize = True
    status = llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(parameters)
    )
    if status == 0:
        with target.open("rb+") as file:
            os.fsync(file.fileno())
    return int(status)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 when it did what it was asked."""
    parser = argparse.ArgumentParser(prog="edge_agent.engine.llama.llama_cpp")
    parser.add_argument("--parent", type=int)
    parser.add_argument("--nice", type=int, default=0)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve")
    quantise = commands.add_parser("quantise")
    quantise.add_argument("source", type=Path)
    quantise.add_argument("target", type=Path)
    quantise.add_argument("quantisation")
    quantise.add_argument("threads", type=int)
    options = parser.parse_args(arguments)

    _die_with_parent(options.parent)
    _be_the_first_to_go()
    source, sink = _private_pipes()
    if options.nice:
        os.nice(options.nice)
    if options.command == "serve":
        return _serve(source, sink)
    _watch_parent(source)
    return _quantise(options.source, options.target, options.quantisation, options.threads)


if __name__ == "__main__":
    sys.exit(main())
