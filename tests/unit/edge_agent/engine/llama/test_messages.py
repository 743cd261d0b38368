from pathlib import Path

import pytest

from edge_agent.engine.base import (
    EngineSettings,
    Finished,
    FormatKind,
    GenerationRequest,
    LoadedModel,
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
from edge_agent.engine.llama.messages import (
    LENGTH,
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
    decode_to_child,
    encode_from_child,
    encode_to_child,
)
from edge_agent.errors import EngineFailure

SAMPLING = Sampling(5, 0.0, 0.5, 3, 2**64 - 1, ("é\n", "🐦"))


def unframed(frame: bytes) -> bytes:
    (length,) = LENGTH.unpack(frame[: LENGTH.size])
    assert length == len(frame) - LENGTH.size
    return frame[LENGTH.size :]


@pytest.mark.parametrize(
    "message",
    [
        LoadCommand(EngineSettings(Path("/m/a b.gguf"), 512, 3, 2, 0, 0.5, "{{ x }}", 9.0)),
        LoadCommand(EngineSettings(Path("/m"), prefix_reuse=PrefixReuse.SESSION)),
        Generate(GenerationRequest("k", "prompt €", SAMPLING)),
        Generate(
            GenerationRequest(
                "k", "p", SAMPLING, ResponseFormat(FormatKind.JSON_SCHEMA, "{}"), "session"
            )
        ),
        Generate(GenerationRequest("k", (Message("user", "a"), Message("assistant", "b")))),
        Cancel("k"),
    ],
)
def test_what_the_agent_says_arrives(message: ToChild) -> None:
    assert decode_to_child(unframed(encode_to_child(message))) == message


@pytest.mark.parametrize(
    "message",
    [
        Loaded(LoadedModel(512, 3, True, None, "llama", 135, 4.4, "llama-cpp-python 0", None)),
        LoadFailed(EngineFailure.OUT_OF_MEMORY, "too big"),
        Step((), 0.0),
        Step(
            (
                ("a", SlotGiven()),
                ("a", PromptProgress(3, 9)),
                ("b", TextChunk("🐦", 4)),
                ("b", Finished(StopReason.LENGTH, 1, 2, 0.1, 0.2, 0.3, 0.4, 1)),
            ),
            1.5,
        ),
    ],
)
def test_what_the_child_says_arrives(message: FromChild) -> None:
    assert decode_from_child(unframed(encode_from_child(message))) == message


def test_a_rejection_arrives_with_its_kind() -> None:
    error = RejectedError(RejectionKind.CONTEXT_EXCEEDED, "too long")
    step = decode_from_child(unframed(encode_from_child(Step((("k", error),), 0.0))))
    assert isinstance(step, Step)
    ((key, received),) = step.events
    assert key == "k"
    assert isinstance(received, RejectedError)
    assert received.kind is RejectionKind.CONTEXT_EXCEEDED
    assert str(received) == "too long"


@pytest.mark.parametrize(
    "data", [b"{}", b"[]", b"nonsense", b'{"what":1}', b'{"step":[0,[["k","x"]]]}']
)
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, AttributeError)):
        decode_from_child(data)
