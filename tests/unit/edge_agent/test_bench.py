import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_agent.bench import BenchReport, calibrate, run_bench
from edge_agent.engine.base import EngineSettings
from edge_agent.engine.fake import FakeEngine, FakeSpeeds, fake_answer
from edge_agent.errors import EngineError, EngineFailure, UsageError
from tests.fakes.virtual_time import VirtualTime

SPEEDS = FakeSpeeds(
    prefill_tokens_per_second=100.0,
    decode_tokens_per_second=20.0,
    saturated_decode_tokens_per_second=60.0,
    load_seconds=2.0,
)


def long_answer(prompt: str, seed: int) -> str:
    return "word " * 500


def settings(slots: int = 4, context_tokens: int = 512) -> EngineSettings:
    return EngineSettings(Path("fake.gguf"), context_tokens=context_tokens, slots=slots, threads=3)


def fake(
    time: VirtualTime,
    settings: EngineSettings,
    answer: Callable[[str, int], str] = long_answer,
    load_failure: EngineError | None = None,
) -> FakeEngine:
    return FakeEngine(
        settings,
        speeds=SPEEDS,
        answer=answer,
        sleep=time.sleep,
        clock=time.clock,
        load_failure=load_failure,
    )


def calibrated(
    settings: EngineSettings, answer: Callable[[str, int], str] = long_answer
) -> tuple[float, float, float]:
    time = VirtualTime()

    async def scenario() -> tuple[float, float, float]:
        engine = fake(time, settings, answer)
        await engine.load()
        rates = await calibrate(engine, settings.slots, clock=time.clock)
        assert engine.stats().busy_slots == engine.stats().queued_requests == 0
        return rates

    result: tuple[float, float, float] = time.run(scenario())
    return result


def test_a_calibration_finds_the_speeds_that_the_engine_has() -> None:
    prefill, alone, together = calibrated(settings())
    assert prefill == pytest.approx(100.0, rel=0.05)
    assert alone == pytest.approx(20.0, rel=0.05)
    assert together == pytest.approx(60.0, rel=0.05)


def test_an_engine_with_one_slot_is_as_fast_full_as_alone() -> None:
    _, alone, together = calibrated(settings(slots=1))
    assert alone == together == pytest.approx(20.0, rel=0.05)


def test_a_short_context_is_read_with_a_shorter_prompt() -> None:
    prefill, _, _ = calibrated(settings(context_tokens=64))
    assert prefill == pytest.approx(100.0, rel=0.1)


def test_an_answer_that_ends_early_is_measured_as_far_as_it_went() -> None:
    _, alone, together = calibrated(settings(), fake_answer)
    assert alone == pytest.approx(20.0, rel=0.1)
    assert together == pytest.approx(60.0, rel=0.1)


def test_a_model_that_says_nothing_cannot_be_measured() -> None:
    with pytest.raises(EngineError, match="speed cannot be measured"):
        calibrated(settings(), lambda prompt, seed: "no")


def report(rounds: int = 2) -> BenchReport:
    time = VirtualTime()
    work = run_bench(
        settings(slots=6),
        rounds=rounds,
        seconds=2.0,
        make_engine=lambda settings: fake(time, settings),
        clock=time.clock,
    )
    result: BenchReport = time.run(work)
    return result


def test_a_report_has_every_number_of_sequences_up_to_the_slots() -> None:
    found = report()
    assert [rate.sequences for rate in found.decode] == [1, 2, 4, 6]
    assert found.decode[0].ratio == 1.0
    assert found.decode[-1].ratio == pytest.approx(3.0, rel=0.05)
    assert found.decode[-1].tokens_per_second == pytest.approx(60.0, rel=0.05)
    assert all(len(rate.rounds) == 2 for rate in found.decode)
    assert found.load_seconds == pytest.approx(2.0)
    assert found.prefill_tokens_per_second == pytest.approx(100.0, rel=0.05)
    assert (found.slots, found.threads, found.context_tokens) == (6, 3, 512)


def test_a_report_is_plain_json() -> None:
    found = json.loads(json.dumps(report(rounds=1).as_dict()))
    assert found["model"] == "fake.gguf"
    assert found["decode"][0]["sequences"] == 1
    assert set(found["decode"][0]) == {"sequences", "tokens_per_second", "ratio", "rounds"}


def test_a_model_that_cannot_be_loaded_ends_the_bench() -> None:
    time = VirtualTime()
    failure = EngineError(EngineFailure.OUT_OF_MEMORY, "too big")
    work = run_bench(
        settings(), make_engine=lambda settings: fake(time, settings, load_failure=failure)
    )
    with pytest.raises(EngineError, match="too big"):
        time.run(work)


def test_a_bench_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError):
        asyncio.run(run_bench(settings(), rounds=0))
