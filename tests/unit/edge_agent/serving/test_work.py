import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings, Message, Sampling
from edge_agent.engine.fake import FakeEngine, FakeSpeeds, fake_answer
from edge_agent.errors import EngineError, EngineFailure
from edge_agent.sensors.power_model import PowerModel
from edge_agent.serving.completion import Completion, FailureKind, FinishReason
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.lifecycle import Ask, Known, Preparing
from edge_agent.serving.work import WorkDesk, WorkOrder
from tests.fakes.hosted import READY, hosted_model
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio

POWER = PowerModel(4.0, 10.0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Gate:
    """What a fake engine sleeps by: it goes on only while the gate is open, and time is pretended.

    `now` advances by each pretended wait, so seconds in completions are exact.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        await self._open.wait()
        self.now += seconds


@dataclass
class Bench:
    """A desk with one fake model and a listener that writes everything down."""

    engine: FakeEngine
    hosted: HostedModel
    gate: Gate
    desk: WorkDesk = field(init=False)
    text: dict[tuple[str, int], str] = field(default_factory=dict)
    tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)
    after_the_end: list[tuple[str, int]] = field(default_factory=list)
    stops_at_text: bool = False

    def progressed(self, request_id: str, attempt: int, text: str, tokens: int) -> None:
        key = (request_id, attempt)
        if any((c.request_id, c.attempt) == key for c in self.completions):
            self.after_the_end.append(key)
        self.text[key] = self.text.get(key, "") + text
        self.tokens[key] = self.tokens.get(key, 0) + tokens
        if text and self.stops_at_text:
            self.gate.close()

    def completed(self, completion: Completion) -> None:
        self.completions.append(completion)

    async def ended(self, count: int = 1) -> Completion:
        """The latest of so many completions."""
        await until(lambda: len(self.completions) >= count and not self.desk.running_requests)
        assert len(self.completions) == count
        assert self.after_the_end == []
        return self.completions[-1]


@asynccontextmanager
async def bench(
    power: PowerModel | None = POWER, slots: int = 2, **engine: Any
) -> AsyncIterator[Bench]:
    gate = Gate()
    made = FakeEngine(
        EngineSettings(Path("/nowhere.gguf"), context_tokens=500, slots=slots),
        sleep=gate.sleep,
        clock=lambda: gate.now,
        **engine,
    )
    loaded = await made.load()
    hosted = hosted_model(ModelSettings("small"), READY, made, Known(loaded=loaded))
    found = Bench(made, hosted, gate)
    found.desk = WorkDesk({"small": hosted}.get, found, power)
    try:
        yield found
    finally:
        gate.open()
        await made.close()
        await found.desk.drain(5.0)
        assert found.desk.running_requests == 0


def order(name: str = "r1", attempt: int = 1, **changes: Any) -> WorkOrder:
    fields: dict[str, Any] = {
        "model": "small",
        "prompt": "Hello there",
        "sampling": Sampling(max_tokens=50, seed=7),
        "time_limit_seconds": 60.0,
        **changes,
    }
    return WorkOrder(name, attempt, **fields)


# -- an order from beginning to end ----------------------------------------------------------------


async def test_order_streams_its_text_and_ends_with_one_account() -> None:
    async with bench() as made:
        made.desk.accept(order())
        completion = await made.ended()
        assert completion.outcome is FinishReason.STOP
        assert made.text["r1", 1] == fake_answer("Hello there", 7)
        assert made.tokens["r1", 1] == completion.usage.completion_tokens > 0
        assert completion.usage.prompt_tokens > 0
        assert made.desk.completed_requests == 1
        assert list(made.desk.recent) == [completion]
        assert made.engine.stats().busy_slots == 0


async def test_chat_reaches_the_engine_as_its_turns() -> None:
    async with bench() as made:
        made.desk.accept(order(prompt=(Message("system", "Be brief."), Message("user", "Hi"))))
        await made.ended()
        assert made.text["r1", 1] == fake_answer("Be brief.\nHi", 7)


async def test_length_limit_is_its_own_outcome() -> None:
    async with bench() as made:
        made.desk.accept(order(sampling=Sampling(max_tokens=3, seed=7)))
        completion = await made.ended()
        assert (completion.outcome, completion.usage.completion_tokens) == (FinishReason.LENGTH, 3)


async def test_energy_is_the_engines_work_at_full_power_and_adds_up() -> None:
    speeds = FakeSpeeds(prefill_tokens_per_second=100.0, decode_tokens_per_second=10.0)
    async with bench(speeds=speeds) as made:
        made.desk.accept(order("r1"))
        made.desk.accept(order("r2"))
        await made.ended(2)
        for completion in made.completions:
            work = (
                completion.usage.prompt_tokens / 100.0 + completion.usage.completion_tokens / 10.0
            )
            assert completion.usage.energy_joules == pytest.approx(10.0 * work)
        total = sum(completion.usage.energy_joules or 0.0 for completion in made.completions)
        assert made.desk.energy_joules == pytest.approx(total)
        assert total == pytest.approx(10.0 * made.engine.stats().busy_seconds_total)


async def test_energy_is_unknown_without_a_power_model_and_never_zero() -> None:
    async with bench(power=None) as made:
        made.desk.accept(order())
        assert (await made.ended()).usage.energy_joules is None


# -- repeats ---------------------------------------------------------------------------------------


async def test_repeated_order_is_worked_on_once() -> None:
    """While it runs, and after it has ended."""
    async with bench() as made:
        made.gate.close()
        for _ in range(3):
            made.desk.accept(order())
        assert made.desk.running_requests == 1
        made.gate.open()
        await made.ended()
        made.desk.accept(order())
        await asyncio.sleep(0)
        assert made.desk.running_requests == 0
        await made.ended(1)


async def test_another_attempt_is_another_order() -> None:
    async with bench() as made:
        made.desk.accept(order(attempt=1))
        made.desk.accept(order(attempt=2))
        await made.ended(2)
        assert made.text["r1", 1] == made.text["r1", 2]


async def test_controller_that_comes_anew_may_count_its_attempts_anew() -> None:
    """After the link was lost the other side may be a restarted controller."""
    async with bench() as made:
        made.desk.accept(order())
        await made.ended(1)
        made.desk.cancel_all()
        made.completions.clear()
        made.desk.accept(order())
        assert (await made.ended()).outcome is FinishReason.STOP


# -- cancellation ----------------------------------------------------------------------------------


async def test_cancelled_order_ends_soon_and_tells_what_it_cost() -> None:
    async with bench() as made:
        made.stops_at_text = True
        made.desk.accept(order())
        await until(lambda: made.tokens.get(("r1", 1), 0) > 0)
        made.desk.cancel("r1", 1)
        completion = await made.ended()
        assert completion.outcome is FinishReason.CANCELLED
        assert completion.usage.completion_tokens > 0
        assert completion.usage.energy_joules is not None
        assert made.engine.stats().busy_slots == 0


@pytest.mark.parametrize("turns", range(6))
async def test_order_cancelled_at_any_moment_has_exactly_one_ending(turns: int) -> None:
    """Also one that is cancelled before it has begun."""
    async with bench() as made:
        made.gate.close()
        made.desk.accept(order())
        for _ in range(turns):
            await asyncio.sleep(0)
        made.desk.cancel("r1", 1)
        made.desk.cancel("r1", 1)
        completion = await made.ended()
        assert completion.outcome is FinishReason.CANCELLED
        made.desk.cancel("r1", 1)
        stats = made.engine.stats()
        assert (stats.busy_slots, stats.queued_requests) == (0, 0)


async def test_order_that_waits_for_a_slot_can_be_cancelled() -> None:
    async with bench(slots=1) as made:
        made.gate.close()
        made.desk.accept(order("first"))
        made.desk.accept(order("waits"))
        await until(lambda: made.engine.stats().queued_requests == 1)
        made.desk.cancel("waits", 1)
        await until(lambda: len(made.completions) == 1)
        assert made.completions[0].request_id == "waits"
        made.gate.open()
        assert (await made.ended(2)).outcome is FinishReason.STOP


async def test_cancel_of_another_attempt_or_an_unknown_order_changes_nothing() -> None:
    async with bench() as made:
        made.desk.cancel("unknown", 1)
        made.desk.accept(order(attempt=2))
        made.desk.cancel("r1", 1)
        assert (await made.ended()).outcome is FinishReason.STOP


# -- failures --------------------------------------------------------------------------------------


async def test_time_limit_ends_an_order_with_its_own_failure() -> None:
    async with bench() as made:
        made.gate.close()
        made.desk.accept(order(time_limit_seconds=0.01))
        completion = await made.ended()
        assert completion.failure is FailureKind.TIME_LIMIT
        assert "longer than 0.01 s" in completion.message
        assert made.engine.stats().busy_slots == 0
        assert made.desk.failed_requests == 1


async def test_crash_fails_what_runs_and_what_comes_until_the_engine_is_back() -> None:
    async with bench() as made:
        made.gate.close()
        made.desk.accept(order("r1"))
        await until(lambda: made.engine.stats().busy_slots == 1)
        made.engine.fail(EngineError(EngineFailure.CRASHED, "the child died by signal 9"))
        completion = await made.ended()
        assert completion.failure is FailureKind.ENGINE_CRASHED
        assert "signal 9" in completion.message
        made.desk.accept(order("r2"))
        assert (await made.ended(2)).failure is FailureKind.ENGINE_CRASHED
        made.engine.recover()
        made.gate.open()
        made.desk.accept(order("r3"))
        assert (await made.ended(3)).outcome is FinishReason.STOP


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"prompt": "word " * 600}, FailureKind.CONTEXT_EXCEEDED),
        ({"prompt": ""}, FailureKind.INVALID_REQUEST),
        ({"sampling": Sampling(max_tokens=0)}, FailureKind.INVALID_REQUEST),
        ({"model": "large"}, FailureKind.MODEL_NOT_LOADED),
    ],
)
async def test_order_that_cannot_be_answered_says_why(
    changes: dict[str, Any], kind: FailureKind
) -> None:
    async with bench() as made:
        made.desk.accept(order(**changes))
        completion = await made.ended()
        assert (completion.outcome, completion.failure) == (FinishReason.FAILED, kind)
        assert completion.message


async def test_chat_for_a_model_without_a_template_is_refused() -> None:
    async with bench(has_chat_template=False) as made:
        made.desk.accept(order(prompt=(Message("user", "Hi"),)))
        assert (await made.ended()).failure is FailureKind.INVALID_REQUEST


async def test_full_queue_is_its_own_failure_so_that_the_request_may_move() -> None:
    async with bench(slots=1, max_queued=1) as made:
        made.gate.close()
        for number in range(3):
            made.desk.accept(order(f"r{number}"))
        await until(lambda: len(made.completions) == 1)
        assert made.completions[0].failure is FailureKind.QUEUE_FULL
        made.gate.open()
        await made.ended(3)


async def test_model_that_is_loading_tells_how_far_it_is() -> None:
    async with bench() as made:
        stage = Preparing(Ask(), "downloading (30 %)", is_downloading=True)
        made.hosted.life = replace(made.hosted.life, stage=stage)
        made.desk.accept(order())
        completion = await made.ended()
        assert completion.failure is FailureKind.MODEL_NOT_LOADED
        assert "downloading (30 %)" in completion.message


async def test_fault_of_the_engines_own_code_fails_one_order() -> None:
    class Broken(FakeEngine):
        def generate(self, request: Any) -> Any:
            raise RuntimeError("a bug")

    async with bench() as made:
        made.hosted.made = Broken(EngineSettings(Path("/nowhere.gguf")))
        made.desk.accept(order())
        completion = await made.ended()
        assert completion.failure is FailureKind.INTERNAL
        assert "a bug" not in completion.message


# -- drain -----------------------------------------------------------------------------------------


async def test_drained_desk_refuses_what_is_new_and_finishes_what_it_has() -> None:
    async with bench() as made:
        made.gate.close()
        made.desk.accept(order("old"))
        await until(lambda: made.engine.stats().busy_slots == 1)
        made.desk.is_draining = True
        made.desk.accept(order("new"))
        await until(lambda: len(made.completions) == 1)
        assert made.completions[0].failure is FailureKind.DRAINING
        made.gate.open()
        completion = await made.ended(2)
        assert (completion.request_id, completion.outcome) == ("old", FinishReason.STOP)
        made.desk.is_draining = False
        made.desk.accept(order("newer"))
        assert (await made.ended(3)).outcome is FinishReason.STOP


async def test_stopping_desk_lets_running_orders_end() -> None:
    async with bench() as made:
        made.gate.close()
        made.desk.accept(order())
        await until(lambda: made.engine.stats().busy_slots == 1)
        draining = asyncio.create_task(made.desk.drain(30.0))
        await asyncio.sleep(0)
        made.gate.open()
        await draining
        assert made.completions[0].outcome is FinishReason.STOP


async def test_stopping_desk_cuts_off_what_outlasts_its_time() -> None:
    async with bench() as made:
        made.gate.close()
        made.desk.accept(order())
        await until(lambda: made.engine.stats().busy_slots == 1)
        await made.desk.drain(0.0)
        assert (await made.ended()).outcome is FinishReason.CANCELLED


async def test_stopping_desk_is_not_talked_into_taking_work_again() -> None:
    """1. the agent stops; 2. its link comes back anew; 3. the new session does not drain it."""
    async with bench() as made:
        await made.desk.drain(0.0)
        made.desk.is_draining = False
        assert made.desk.is_draining
        made.desk.accept(order())
        assert (await made.ended()).failure is FailureKind.DRAINING
