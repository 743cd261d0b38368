"""What the agent and an engine's child say to each other: length-prefixed JSON.

The child speaks in steps: one message for everything that one step of decoding brought about.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from edge_agent.engine.base import (
    EngineSettings,
    Finished,
    FormatKind,
    GenerationEvent,
    GenerationRequest,
    LoadedModel,
    Message,
    PrefixReuse,
    PromptProgress,
    Rates,
    RejectedError,
    RejectionKind,
    ResponseFormat,
    Sampling,
    StopReason,
    TextChunk,
)
from edge_agent.errors import EngineFailure

LENGTH: Final = struct.Struct(">I")
MAX_MESSAGE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """To the child, first: load this model."""

    settings: EngineSettings


@dataclass(frozen=True, slots=True)
class Generate:
    """To the child: start this when a slot is free."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the child: end this; unknown keys are ignored."""

    key: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """From the child, first: the model is ready."""

    model: LoadedModel


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """From the child, instead: it could not be loaded; the child ends after this."""

    kind: EngineFailure
    message: str


@dataclass(frozen=True, slots=True)
class SlotGiven:
    """A request has got a slot."""


StepEvent = GenerationEvent | SlotGiven | RejectedError


@dataclass(frozen=True, slots=True)
class Step:
    """From the child: (key, event) of everything one step brought about, in order.

    `busy_seconds` is the time spent decoding since the model was loaded.
    """

    events: tuple[tuple[str, StepEvent], ...]
    busy_seconds: float


ToChild = LoadCommand | Generate | Cancel
FromChild = Loaded | LoadFailed | Step


def encode_to_child(message: ToChild) -> bytes:
    """The bytes of a message to the child, with its length before it."""
    match message:
        case LoadCommand(settings):
            body: Mapping[str, Any] = {
                "load": {
                    **asdict(settings),
                    "model_path": str(settings.model_path),
                    "prefix_reuse": settings.prefix_reuse.value,
                }
            }
        case Generate(request):
            prompt: Any = request.prompt
            if not isinstance(prompt, str):
                prompt = [[turn.role, turn.content] for turn in prompt]
            wanted = request.response_format
            body = {
                "generate": {
                    "key": request.key,
                    "prompt": prompt,
                    "sampling": asdict(request.sampling),
                    "format": None if wanted is None else [wanted.kind.value, wanted.text],
                    "session_id": request.session_id,
                }
            }
        case Cancel(key):
            body = {"cancel": {"key": key}}
    return _framed(body)


def decode_to_child(data: bytes) -> ToChild:
    """The message in a frame's bytes, its length stripped."""
    ((kind, body),) = json.loads(data).items()
    if kind == "load":
        fields = {
            **body,
            "model_path": Path(body["model_path"]),
            "prefix_reuse": PrefixReuse(body["prefix_reuse"]),
        }
        return LoadCommand(EngineSettings(**fields))
    if kind == "generate":
        prompt = body["prompt"]
        if not isinstance(prompt, str):
            prompt = tuple(Message(role, content) for role, content in prompt)
        sampling = {**body["sampling"], "stop": tuple(body["sampling"]["stop"])}
        wanted = body["format"]
        return Generate(
            GenerationRequest(
                body["key"],
                prompt,
                Sampling(**sampling),
                None if wanted is None else ResponseFormat(FormatKind(wanted[0]), wanted[1]),
                body["session_id"],
            )
        )
    if kind == "cancel":
        return Cancel(body["key"])
    raise ValueError(f"the agent sent an unknown message {kind!r}")


def encode_from_child(message: FromChild) -> bytes:
    """The bytes of a message from the child, with its length before it."""
    match message:
        case Loaded(model):
            return _framed({"loaded": asdict(model)})
        case LoadFailed(kind, text):
            return _framed({"failed": [kind.value, text]})
        case Step(events, busy_seconds):
            listed = [[key, *_event_fields(event)] for key, event in events]
            return _framed({"step": [busy_seconds, listed]})


def decode_from_child(data: bytes) -> FromChild:
    """The message in a frame's bytes, its length stripped."""
    ((kind, body),) = json.loads(data).items()
    if kind == "step":
        busy_seconds, listed = body
        events = tuple((key, _event_of(name, fields)) for key, name, *fields in listed)
        return Step(events, busy_seconds)
    if kind == "loaded":
        rates = Rates(**body["declared_rates"])
        return Loaded(LoadedModel(**{**body, "declared_rates": rates}))
    if kind == "failed":
        return LoadFailed(EngineFailure(body[0]), body[1])
    raise ValueError(f"the child sent an unknown message {kind!r}")


def _framed(body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    return LENGTH.pack(len(data)) + data


def _event_fields(event: StepEvent) -> Sequence[Any]:
    match event:
        case TextChunk(text, tokens):
            return ("text", text, tokens)
        case PromptProgress(read, total):  # the child sees what it reads
            return ("prompt", read, total)
        case Finished():
            return ("end", {**asdict(event), "reason": event.reason.value})
        case SlotGiven():
            return ("start",)
        case RejectedError():
            return ("reject", event.kind.value, str(event))


def _event_of(name: str, fields: Sequence[Any]) -> StepEvent:
    if name == "text":
        return TextChunk(*fields)
    if name == "prompt":
        return PromptProgress(*fields)
    if name == "end":
        return Finished(**{**fields[0], "reason": StopReason(fields[0]["reason"])})
    if name == "start":
        return SlotGiven()
    if name == "reject":
        return RejectedError(RejectionKind(fields[0]), fields[1])
    raise ValueError(f"the child sent an unknown event {name!r}")
