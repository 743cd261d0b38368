"""Joules of a token, against a board whose draw is known."""

from pathlib import Path

import pytest

from edge_agent.engine.base import EngineSettings, RejectedError, RejectionKind
from edge_agent.engine.fake import FakeEngine, FakeSpeeds
from edge_agent.serving.token_energy import measure_token_energy

pytestmark = pytest.mark.anyio

IDLE_WATTS, READING_WATTS, WRITING_WATTS = 3.0, 13.0, 8.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Board:
    """A clock that only waiting moves, and a meter that knows what is done meanwhile."""

    def __init__(self, answer: str = "word " * 40) -> None:
        self.now = 0.0
        self.joules = 0.0
        self.engine = FakeEngine(
            EngineSettings(Path("/m.gguf"), context_tokens=2000, slots=2),
            speeds=FakeSpeeds(
                prefill_tokens_per_second=400.0,
                decode_tokens_per_second=20.0,
                saturated_decode_tokens_per_second=30.0,
            ),
            answer=lambda prompt, seed: answer,
            sleep=self.sleep,
            clock=lambda: self.now,
        )

    async def sleep(self, seconds: float) -> None:
        stats = self.engine.stats()
        watts = IDLE_WATTS
        if stats.busy_slots:
            reading = seconds > 0.1  # a chunk of a prompt takes longer than a token
            watts = READING_WATTS if reading else WRITING_WATTS
            # Several sequences wait at the same time; the clock is moved by each in turn.
            seconds /= stats.busy_slots
        self.now += seconds
        self.joules += watts * seconds


async def test_joules_above_idle_are_told_apart_by_phase() -> None:
    board = Board()
    await board.engine.load()
    found = await measure_token_energy(
        board.engine,
        2,
        lambda: board.joules,
        clock=lambda: board.now,
        sleep=board.sleep,
    )
    await board.engine.close()
    assert found is not None
    # 10 W above idle while reading 400 tokens a second, and one token of an answer each time.
    assert found.prefill_joules_per_token == pytest.approx(10.0 / 400.0, rel=0.25)
    assert found.decode_joules_per_token > 2 * found.prefill_joules_per_token
    assert IDLE_WATTS < found.load_watts < READING_WATTS


async def test_engine_that_takes_no_raw_prompts_is_not_measured() -> None:
    board = Board()

    class Refusing(FakeEngine):
        def _submit(self, request: object) -> object:  # type: ignore[override]
            raise RejectedError(RejectionKind.INVALID_REQUEST, "chats only")

    engine = Refusing(EngineSettings(Path("/m.gguf")))
    await engine.load()
    found = await measure_token_energy(
        engine, 1, lambda: board.joules, clock=lambda: board.now, sleep=board.sleep
    )
    assert found is None
