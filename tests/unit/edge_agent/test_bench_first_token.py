import json
from pathlib import Path
from typing import Any

import pytest

from edge_agent.bench_first_token import FirstTokenReport, FirstTokenRound, run_first_token
from edge_agent.engine.base import EngineSettings
from edge_agent.engine.fake import FakeEngine, FakeSpeeds
from edge_agent.errors import EngineError, UsageError
from tests.fakes.virtual_time import VirtualTime

SETTINGS = EngineSettings(Path("fake.gguf"), context_tokens=700, slots=2, threads=3)
LONG_TOKENS = 500


def measured(prefill_tokens_per_second: float, **changes: Any) -> FirstTokenReport:
    time = VirtualTime()

    def make_engine(settings: EngineSettings) -> FakeEngine:
        speeds = FakeSpeeds(prefill_tokens_per_second=prefill_tokens_per_second)
        return FakeEngine(settings, speeds=speeds, sleep=time.sleep, clock=time.clock)

    options = {"rounds": 2, "long_tokens": LONG_TOKENS, "settings": SETTINGS, **changes}
    report: FirstTokenReport = time.run(
        run_first_token(make_engine=make_engine, clock=time.clock, sleep=time.sleep, **options)
    )
    return report


def test_a_round_allows_twice_the_idle_time_and_a_chunk() -> None:
    found = FirstTokenRound(idle_seconds=0.1, chunk_seconds=0.4, beside_seconds=0.3)
    assert found.allowed_seconds == pytest.approx(0.6)
    assert found.ratio == pytest.approx(0.5)


def test_first_tokens_are_measured_while_the_long_prompt_is_read() -> None:
    report = measured(prefill_tokens_per_second=300.0)
    assert abs(report.long_tokens - LONG_TOKENS) <= 10
    assert len(report.rounds) == 2
    # Two prompts share what the fake engine reads in a second.
    assert report.beside_seconds > report.idle_seconds > 0
    assert report.chunk_seconds > 0
    assert report.worst_ratio >= report.ratio > 0
    assert json.loads(json.dumps(report.as_dict()))["slots"] == 2


def test_a_long_prompt_that_is_read_at_once_cannot_be_measured_beside() -> None:
    with pytest.raises(EngineError, match="take a longer one"):
        measured(prefill_tokens_per_second=1e6)


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 0},
        {"settings": EngineSettings(Path("fake.gguf"), context_tokens=700, slots=1)},
        {"long_tokens": 650},
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        measured(prefill_tokens_per_second=300.0, **changes)
