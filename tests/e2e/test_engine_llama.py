"""The engine with real weights: llama.cpp in its child process."""

import array
import asyncio
import contextlib
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from edge_agent.bench import run_bench
from edge_agent.engine.base import (
    EngineSettings,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Message,
    PromptProgress,
    RejectedError,
    RejectionKind,
    Sampling,
    StopReason,
    TextChunk,
)
from edge_agent.engine.model_files import describe_model_file
from edge_agent.engine.quantise import quantise
from edge_agent.engine.supervisor import SupervisedEngine
from edge_agent.errors import EngineError, EngineFailure, ModelError

pytestmark = pytest.mark.llama

WAIT_SECONDS = 60.0


def settings_for(path: Path, **changes: object) -> EngineSettings:
    settings = EngineSettings(path, context_tokens=512, slots=2, threads=2)
    return replace(settings, **changes)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running(settings: EngineSettings, **options: float) -> AsyncIterator[SupervisedEngine]:
    engine = SupervisedEngine(settings, first_restart_seconds=0.1, **options)  # type: ignore[arg-type]
    try:
        await asyncio.wait_for(engine.load(), WAIT_SECONDS)
        yield engine
    finally:
        await asyncio.wait_for(engine.close(), WAIT_SECONDS)


async def read_all(engine: SupervisedEngine, request: GenerationRequest) -> list[GenerationEvent]:
    async def read() -> list[GenerationEvent]:
        return [event async for event in engine.generate(request)]

    return await asyncio.wait_for(read(), WAIT_SECONDS)


def text_of(events: list[GenerationEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextChunk))


def account_of(events: list[GenerationEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


async def until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> float:
    """Wait for a condition; the seconds it took."""
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at < seconds
        await asyncio.sleep(0.01)
    return time.monotonic() - started_at


def run(scenario: Awaitable[None]) -> None:
    async def main() -> None:
        await scenario

    asyncio.run(main())


def test_a_chat_is_answered_with_the_template_of_the_file(smollm2: Path) -> None:
    async def scenario() -> None:
        async with running(settings_for(smollm2)) as engine:
            chat = (Message("user", "What is the capital of France? Answer in one word."),)
            events = await read_all(
                engine, GenerationRequest("chat", chat, Sampling(24, temperature=0.0))
            )
            assert "Paris" in text_of(events)
            # The template's own system turn, the question and its markers.
            assert account_of(events).prompt_tokens == 42

    run(scenario())


def test_a_raw_prompt_gets_its_first_token_once_and_no_template(gemma3: Path) -> None:
    async def scenario() -> None:
        async with running(settings_for(gemma3)) as engine:
            model = await engine.load()
            assert not model.has_chat_template
            assert model.template_issue is None
            for key, prompt in {"plain": "Hello", "marked": "<bos>Hello"}.items():
                request = GenerationRequest(key, prompt, Sampling(1, temperature=0.0))
                assert account_of(await read_all(engine, request)).prompt_tokens == 2
            with pytest.raises(RejectedError) as caught:
                await read_all(engine, GenerationRequest("chat", (Message("user", "Hi"),)))
            assert caught.value.kind is RejectionKind.NO_CHAT_TEMPLATE

    run(scenario())


def test_a_template_that_does_not_compile_leaves_raw_prompts(smollm2: Path) -> None:
    """P6."""

    async def scenario() -> None:
        async with running(settings_for(smollm2, chat_template="{% generation %}")) as engine:
            model = await engine.load()
            assert not model.has_chat_template
            assert model.template_issue is not None
            assert "does not compile" in model.template_issue
            with pytest.raises(RejectedError) as caught:
                await read_all(engine, GenerationRequest("chat", (Message("user", "Hi"),)))
            assert caught.value.kind is RejectionKind.NO_CHAT_TEMPLATE
            raw = GenerationRequest("raw", "One, two, three,", Sampling(5))
            assert text_of(await read_all(engine, raw))

    run(scenario())


def test_a_template_from_the_settings_replaces_the_one_of_the_file(smollm2: Path) -> None:
    """P6."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

    async def scenario() -> None:
        async with running(settings_for(smollm2, chat_template=template)) as engine:
            chat = GenerationRequest("chat", (Message("user", "Hi"),), Sampling(4, 0.0))
            raw = GenerationRequest("raw", "user: Hi\nassistant:", Sampling(4, 0.0))
            chatted, plain = await read_all(engine, chat), await read_all(engine, raw)
            assert text_of(chatted) == text_of(plain)
            assert account_of(chatted).prompt_tokens == account_of(plain).prompt_tokens

    run(scenario())


def test_eight_streams_of_one_model_come_out_as_they_do_alone(smollm2: Path) -> None:
    prompts = [
        "Once upon a time",
        "The recipe for bread begins with",
        "1, 2, 4, 8, 16,",
        "Dear Sir or Madam,",
        "def fibonacci(n):",
        "In the beginning of the voyage the ship",
        "The three primary colours are",
        "Water boils at",
    ]

    async def scenario() -> None:
        async with running(settings_for(smollm2, slots=8)) as engine:
            order: list[int] = []

            async def answer(number: int, name: str) -> str:
                request = GenerationRequest(
                    f"{name}-{number}", prompts[number], Sampling(20, temperature=0.0)
                )
                text = ""
                async for event in engine.generate(request):
                    if isinstance(event, TextChunk):
                        text += event.text
                        order.append(number)
                return text

            numbers = range(len(prompts))
            alone = [await answer(number, "alone") for number in numbers]
            order.clear()
            together = await asyncio.wait_for(
                asyncio.gather(*(answer(number, "together") for number in numbers)), WAIT_SECONDS
            )
            assert list(together) == alone
            assert len(set(alone)) == len(prompts)
            # In the middle everyone gets a turn before anyone gets three.
            middle = order[len(order) // 2 - 12 : len(order) // 2 + 12]
            assert len(set(middle)) >= 6

    run(scenario())


LOGITS_PROGRAM = """
import array, json, sys
from pathlib import Path
from edge_agent.engine.base import EngineSettings
from edge_agent.engine.llama_cpp import LlamaModel, logits_of
path, texts = Path(sys.argv[1]), json.loads(sys.argv[2])
settings = EngineSettings(path, context_tokens=256, slots=len(texts), threads=2)
model = LlamaModel(settings)
prompts = [model.tokenise(text).tokens for text in texts]
for together in (False, True):
    for row in logits_of(settings, prompts, together=together):
        print(array.array("f", row).tobytes().hex())
"""

LOGITS_TEXTS = ["Once upon a time", "The capital of France is", "1 2 3 4 5 6", "Dear Sir,"]


def logits(path: Path, texts: list[str]) -> tuple[list[list[float]], list[list[float]]]:
    """Logits of each text alone and together, from a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", LOGITS_PROGRAM, str(path), json.dumps(texts)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [list(array.array("f", bytes.fromhex(line))) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(texts)
    return rows[: len(texts)], rows[len(texts) :]


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def probabilities(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    total = sum(weights)
    return [weight / total for weight in weights]


def test_logits_of_a_sequence_among_others_equal_those_of_it_alone(smollm2: Path) -> None:
    texts = [*LOGITS_TEXTS, "def f(x):", "Water boils at", "In 1969", "Roses are red"]
    alone, together = logits(smollm2, texts)
    assert len(alone) == len(together) == 8
    for one, other in zip(alone, together, strict=True):
        assert largest_difference(one, other) < 1e-3
    # The texts do differ, so that equal logits are no accident.
    assert all(largest_difference(alone[0], row) > 1.0 for row in alone[1:])


def test_logits_of_k_quants_differ_by_no_more_than_their_rounding(gemma3: Path) -> None:
    """Four rows at a time K-quants use another kernel, which rounds activations its own way.

    Where one activation falls to the other side of an 8-bit step, the logits move by as much as
    they do between two kernels for one sequence alone (up to 4 measured, with flash attention
    and without); in batches of two they are the same to the last bit.
    """
    alone, together = logits(gemma3, LOGITS_TEXTS[:2])
    for one, other in zip(alone, together, strict=True):
        assert largest_difference(one, other) < 1e-3
    alone, together = logits(gemma3, LOGITS_TEXTS)
    for one, other in zip(alone, together, strict=True):
        assert largest_difference(probabilities(one), probabilities(other)) < 0.1
        assert one.index(max(one)) == other.index(max(other))


def test_a_cancel_while_decoding_frees_the_slot_at_once(smollm2: Path) -> None:
    """S1."""

    async def scenario() -> None:
        async with running(settings_for(smollm2, slots=1)) as engine:
            stream = engine.generate(
                GenerationRequest("k", "Count: one, two,", Sampling(400, temperature=0.0))
            )
            async for event in stream:
                if isinstance(event, TextChunk):
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            assert await until(lambda: engine.stats().busy_slots == 0) < 1.0
            busy = engine.stats().busy_seconds_total
            await asyncio.sleep(0.5)
            assert engine.stats().busy_seconds_total == busy

    run(scenario())


def test_a_cancel_within_a_long_prompt_frees_the_slot_at_once(smollm2: Path) -> None:
    """S2."""

    async def scenario() -> None:
        async with running(settings_for(smollm2, slots=1, context_tokens=6000)) as engine:
            prompt = "the quick brown fox " * 1200
            stream = engine.generate(GenerationRequest("k", prompt))
            first = await anext(stream)
            assert isinstance(first, PromptProgress)
            assert first.tokens_total > 4000
            assert first.tokens_read < first.tokens_total / 4
            await engine.cancel("k")
            rest = [event async for event in stream]
            assert account_of(rest).reason is StopReason.CANCELLED
            assert not any(isinstance(event, TextChunk) for event in rest)
            assert account_of(rest).prefill_seconds < 2.0
            assert engine.stats().busy_slots == 0

    run(scenario())


def test_a_long_prompt_does_not_stop_the_answer_of_another(smollm2: Path) -> None:
    async def scenario() -> None:
        async with running(settings_for(smollm2, context_tokens=2048)) as engine:
            gaps: list[float] = []
            is_reading = asyncio.Event()

            async def talk() -> None:
                last = None
                async for event in engine.generate(
                    GenerationRequest("talk", "One, two, three,", Sampling(400, temperature=0.0))
                ):
                    if isinstance(event, TextChunk):
                        now = time.monotonic()
                        if last is not None and is_reading.is_set():
                            gaps.append(now - last)
                        last = now

            talker = asyncio.create_task(talk())
            await until(lambda: engine.stats().busy_slots == 1)
            is_reading.set()
            request = GenerationRequest("read", "the quick brown fox " * 300, Sampling(1))
            account = account_of(await read_all(engine, request))
            is_reading.clear()
            await engine.cancel("talk")
            await talker
            assert account.prefill_seconds > 0.5
            assert len(gaps) > 4
            assert max(gaps) < account.prefill_seconds / 2

    run(scenario())


def test_characters_of_many_tokens_are_shown_whole(smollm2: Path) -> None:
    """S10: emoji are several tokens of this vocabulary, each with part of the character."""

    async def scenario() -> None:
        async with running(settings_for(smollm2)) as engine:
            prompt = "🐦🐟🐦🐟🐦🐟🐦🐟🐦🐟🐦🐟🐦🐟🐦🐟"
            events = await read_all(
                engine, GenerationRequest("k", prompt, Sampling(60, temperature=0.0))
            )
            chunks = [event for event in events if isinstance(event, TextChunk)]
            text = text_of(events)
            assert any(len(character.encode()) == 4 for character in text)
            assert "\N{REPLACEMENT CHARACTER}" not in text
            assert any(chunk.tokens > 1 for chunk in chunks)

    run(scenario())


def test_a_killed_child_ends_its_streams_with_an_error_and_is_restarted(smollm2: Path) -> None:
    """S4, S5, P1."""

    async def scenario() -> None:
        async with running(settings_for(smollm2)) as engine:
            request = GenerationRequest("k", "One, two, three,", Sampling(400, temperature=0.0))
            stream = engine.generate(request)
            await anext(stream)
            first_pid = engine.child_pid
            assert first_pid is not None
            os.kill(first_pid, signal.SIGKILL)
            with pytest.raises(EngineError) as caught:
                await asyncio.wait_for(drain(stream), WAIT_SECONDS)
            assert caught.value.kind is EngineFailure.CRASHED
            assert "signal 9" in str(caught.value)
            assert "signal 9" in (engine.stats().issue or "")
            await until(lambda: engine.stats().is_ready)
            assert engine.child_pid not in (None, first_pid)
            assert engine.stats().issue is None
            assert text_of(await read_all(engine, replace(request, sampling=Sampling(5))))

    run(scenario())


async def drain(stream: AsyncIterator[GenerationEvent]) -> None:
    async for event in stream:
        assert not isinstance(event, Finished)


def test_restarting_goes_on_until_the_cause_is_mended(smollm2: Path, tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to(smollm2)

    async def scenario() -> None:
        async with running(settings_for(link)) as engine:
            pid = engine.child_pid
            assert pid is not None
            link.unlink()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: "missing_file" in (engine.stats().issue or ""))
            assert not engine.stats().is_ready
            link.symlink_to(smollm2)
            await until(lambda: engine.stats().is_ready)
            assert engine.stats().issue is None

    run(scenario())


def test_a_child_that_hangs_is_killed_and_restarted(smollm2: Path) -> None:
    """L17: the process is there, but nothing advances."""

    async def scenario() -> None:
        async with running(settings_for(smollm2), stall_seconds=1.0) as engine:
            stream = engine.generate(
                GenerationRequest("k", "One, two, three,", Sampling(400, temperature=0.0))
            )
            await anext(stream)
            pid = engine.child_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EngineError) as caught:
                await asyncio.wait_for(drain(stream), WAIT_SECONDS)
            assert caught.value.kind is EngineFailure.STALLED
            assert not psutil.pid_exists(pid)
            await until(lambda: engine.stats().is_ready)

    run(scenario())


def test_an_idle_child_is_not_taken_for_a_hung_one(smollm2: Path) -> None:
    """L17."""

    async def scenario() -> None:
        async with running(settings_for(smollm2), stall_seconds=0.4) as engine:
            pid = engine.child_pid
            await asyncio.sleep(1.0)
            request = GenerationRequest("k", "One, two,", Sampling(3))
            assert account_of(await read_all(engine, request)).completion_tokens == 3
            assert engine.child_pid == pid

    run(scenario())


def test_closing_gives_the_memory_back_and_leaves_no_process(smollm2: Path) -> None:
    """P4."""

    async def scenario() -> None:
        engine = SupervisedEngine(settings_for(smollm2))
        model = await engine.load()
        pid = engine.child_pid
        assert pid is not None
        assert model.resident_bytes is not None
        assert model.resident_bytes > smollm2.stat().st_size / 2
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        started_at = time.monotonic()
        await engine.close()
        assert time.monotonic() - started_at < 2.0
        assert not psutil.pid_exists(pid)
        assert engine.stats().resident_bytes is None

    run(scenario())


def test_closing_while_loading_ends_the_child(smollm2: Path) -> None:
    async def scenario() -> None:
        before = {child.pid for child in psutil.Process().children()}
        engine = SupervisedEngine(settings_for(smollm2))
        loading = asyncio.create_task(engine.load())
        await until(lambda: {c.pid for c in psutil.Process().children()} != before)
        await asyncio.wait_for(engine.close(), WAIT_SECONDS)
        with pytest.raises(EngineError):
            await asyncio.wait_for(loading, WAIT_SECONDS)
        assert {child.pid for child in psutil.Process().children()} == before

    run(scenario())


ORPHAN_PROGRAM = """
import asyncio, sys
from pathlib import Path
from edge_agent.engine.base import EngineSettings
from edge_agent.engine.supervisor import SupervisedEngine

async def main():
    engine = SupervisedEngine(EngineSettings(Path(sys.argv[1]), context_tokens=256))
    await engine.load()
    print(engine.child_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_child_dies_with_an_agent_that_is_killed(smollm2: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN_PROGRAM, str(smollm2)], stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        child = psutil.Process(pid)
        agent.kill()
        child.wait(timeout=5.0)


def test_a_load_that_takes_too_long_is_given_up(smollm2: Path) -> None:
    async def scenario() -> None:
        engine = SupervisedEngine(settings_for(smollm2, load_deadline_seconds=0.01))
        with pytest.raises(EngineError) as caught:
            await engine.load()
        assert caught.value.kind is EngineFailure.LOAD_TIMEOUT
        assert not psutil.Process().children()
        await engine.close()

    run(scenario())


def tiny_gguf(architecture: str) -> bytes:
    """A whole GGUF file of one entry and no tensors."""
    key, value = b"general.architecture", architecture.encode()
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("never-heard-of", EngineFailure.UNSUPPORTED_ARCHITECTURE),
        ("llama", EngineFailure.BAD_MODEL_FILE),
    ],
)
def test_a_file_that_llama_cpp_refuses_is_classified(
    tmp_path: Path, architecture: str, kind: EngineFailure
) -> None:
    """P5."""
    path = tmp_path / "odd.gguf"
    path.write_bytes(tiny_gguf(architecture))

    async def scenario() -> None:
        engine = SupervisedEngine(settings_for(path))
        with pytest.raises(EngineError) as caught:
            await asyncio.wait_for(engine.load(), WAIT_SECONDS)
        assert caught.value.kind is kind
        assert caught.value.stderr_tail
        assert engine.stats().issue is not None
        await engine.close()

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["smollm2", "gemma3"])
def test_eight_sequences_are_decoded_faster_than_one(
    weights: str, request: pytest.FixtureRequest
) -> None:
    """Batching works at all; how much it brings is for `edge-agent bench`, on a quiet machine."""
    settings = settings_for(request.getfixturevalue(weights), slots=8)
    report = asyncio.run(run_bench(settings, rounds=3, seconds=0.8))
    assert [rate.sequences for rate in report.decode] == [1, 2, 4, 8]
    assert report.decode[-1].ratio > 1.1


def test_a_share_of_the_processor_leaves_the_rest_of_the_time(smollm2: Path) -> None:
    async def scenario() -> None:
        async with running(settings_for(smollm2, cpu_share_ratio=0.25)) as engine:
            request = GenerationRequest("k", "One, two, three,", Sampling(20, temperature=0.0))
            account = account_of(await read_all(engine, request))
            active = account.prefill_seconds + account.decode_seconds
            assert 0.1 < account.work_seconds / active < 0.4

    run(scenario())


def test_a_quantised_file_is_smaller_and_answers(smollm2: Path, tmp_path: Path) -> None:
    target = tmp_path / "smol-q4_0.gguf"

    async def scenario() -> None:
        await quantise(smollm2, target, "q4_0", 2)
        model = describe_model_file(target)
        assert model.quantisation == "Q4_0"
        assert model.size_bytes < smollm2.stat().st_size
        assert model.has_chat_template
        async with running(settings_for(target)) as engine:
            chat = (Message("user", "What is the capital of France? Answer in one word."),)
            request = GenerationRequest("k", chat, Sampling(24, temperature=0.0))
            assert "Paris" in text_of(await read_all(engine, request))

    run(scenario())
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_failed_or_cancelled_quantisation_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    """M6."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_gguf("llama"))
    target = tmp_path / "target.gguf"

    async def scenario() -> None:
        with pytest.raises(ModelError, match="quantiser failed"):
            await quantise(broken, target, "Q4_0", 1)
        with pytest.raises(ModelError, match="took longer"):
            await quantise(smollm2, target, "Q4_0", 1, deadline_seconds=0.01)
        task = asyncio.create_task(quantise(smollm2, target, "Q4_0", 1))
        await until(lambda: bool(psutil.Process().children()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not psutil.Process().children()

    run(scenario())
    assert [path.name for path in tmp_path.iterdir()] == [broken.name]
