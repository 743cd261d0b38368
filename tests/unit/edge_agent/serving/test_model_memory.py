"""Models that share a node's memory: made room for, unloaded, pinned, measured again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from edge_agent.config import MemorySettings, ModelSettings, Settings
from edge_agent.engine.base import (
    EngineSettings,
    EngineStats,
    GenerationRequest,
    InferenceEngine,
    LoadedModel,
    Sampling,
)
from edge_agent.engine.fake import FakeEngine, FakeSpeeds
from edge_agent.engine.spec import PreparedModel, Report
from edge_agent.errors import (
    EngineError,
    MemoryBudgetError,
    ModelBusyError,
    SourcesFailedError,
    UnknownModelError,
)
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.completion import Completion, FailureKind, FinishReason
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.lifecycle import ModelPhase
from edge_agent.serving.models import ModelHost
from edge_agent.serving.speeds import MeasureEnergy
from edge_agent.serving.token_energy import TokenEnergy
from edge_agent.serving.work import WorkDesk, WorkOrder
from tests.fakes.engines import engines_with
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio

MIB = 1 << 20
BUDGET = MemorySettings(budget_bytes=100 * MIB)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def model(name: str, **fields: object) -> ModelSettings:
    return replace(ModelSettings(name, slots=2, threads=1), **fields)  # type: ignore[arg-type]


class SizedEngine(FakeEngine):
    """A fake engine whose process takes what its file says."""

    async def load(self) -> LoadedModel:
        return replace(await super().load(), resident_bytes=BYTES[self.settings.model_path.stem])

    def stats(self) -> EngineStats:
        return replace(super().stats(), resident_bytes=BYTES[self.settings.model_path.stem])


BYTES = {"a": 40 * MIB, "b": 30 * MIB, "c": 50 * MIB, "huge": 500 * MIB, "liar": 90 * MIB}
ESTIMATES = {**BYTES, "liar": 10 * MIB}


@dataclass
class Bench:
    folder: Path
    models: tuple[ModelSettings, ...]
    memory: MemorySettings = BUDGET
    speeds: FakeSpeeds = field(default_factory=FakeSpeeds)
    now: float = 1000.0
    mode: str = "15W"
    unknown: frozenset[str] = frozenset()
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    measured: list[str] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    gate: asyncio.Event | None = None
    measure_energy: MeasureEnergy | None = None
    available_bytes: int = 1 << 60
    total_bytes: int = 1 << 60

    def __post_init__(self) -> None:
        self.host = ModelHost(
            Settings(node_id="pi", data_dir=self.folder, models=self.models, memory=self.memory),
            self.prepare,
            self.calibrate,
            lambda: None,
            engines_with(self.make_engine, lambda settings: ESTIMATES[settings.model_path.stem]),
            available_bytes=self.available_bytes,
            total_bytes=self.total_bytes,
            measure_energy=self.measure_energy,
            power_mode=lambda: self.mode,
            clock=lambda: self.now,
        )
        self.desk = WorkDesk(self.host.models.get, self, None, bring=self.host.bring)

    def progressed(self, request_id: str, attempt: int, text: str, tokens: int) -> None:
        """Text is of no interest here."""

    def completed(self, completion: Completion) -> None:
        self.completions.append(completion)

    async def prepare(self, name: str, report: Report) -> PreparedModel:
        report("downloading", 0.25, is_downloading=True)
        if name in self.unknown:
            raise SourcesFailedError(f"no source has {name}")
        return PreparedModel(Path(f"/models/{name}.gguf"), name, "llama", 0.1, "Q4_0", 2048, None)

    def make_engine(self, settings: EngineSettings) -> InferenceEngine:
        engine = SizedEngine(settings, speeds=self.speeds)
        self.engines[settings.model_path.stem] = engine
        return engine

    async def calibrate(self, engine: InferenceEngine, slots: int) -> Speeds:
        assert isinstance(engine, FakeEngine)
        self.measured.append(engine.settings.model_path.stem)
        if self.gate is not None:
            await self.gate.wait()
        return Speeds(100.0, 10.0, 10.0 * slots)

    def __getitem__(self, name: str) -> HostedModel:
        return self.host.models[name]

    def measured_mode(self, name: str) -> str | None:
        speeds = self[name].speeds
        return None if speeds is None else speeds.power_mode

    def phases(self) -> dict[str, ModelPhase]:
        return {name: found.phase for name, found in self.host.models.items()}

    def ask(self, name: str, tokens: int = 4) -> None:
        number = len(self.completions)
        self.desk.accept(
            WorkOrder(f"r{number}", 1, name, "Hello", Sampling(max_tokens=tokens, seed=1), 30.0)
        )


@asynccontextmanager
async def running(made: Bench) -> AsyncIterator[Bench]:
    task = asyncio.create_task(made.host.run())
    try:
        yield made
        assert not task.done(), "the host must outlive its models"
        assert made.host.reserved_bytes <= made.host.budget_bytes
    finally:
        task.cancel()
        await asyncio.wait([task])
        await made.host.close()


READY, UNLOADED = ModelPhase.READY, ModelPhase.UNLOADED


async def test_model_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async with running(Bench(tmp_path, (model("a"), model("b"), model("c")))) as made:
        await until(lambda: made["c"].phase is ModelPhase.FAILED)
        assert made.phases() == {"a": READY, "b": READY, "c": ModelPhase.FAILED}
        assert made["c"].issue.startswith("memory_budget: c needs about 50 MiB")
        assert "budget is 100 MiB" in made["c"].issue
        assert made.host.reserved_bytes == 70 * MIB
        with pytest.raises(MemoryBudgetError, match="huge needs about 500 MiB"):
            await made.host.load("huge")
        assert "huge" not in made.host.models


async def test_order_makes_room_at_the_cost_of_the_one_used_longest_ago(tmp_path: Path) -> None:
    async with running(Bench(tmp_path, (model("a"), model("b")))) as made:
        await until(lambda: made["a"].is_ready and made["b"].is_ready)
        made["a"].used(500.0)
        made["b"].used(400.0)
        await made.host.load("c")
        assert made.phases() == {"a": READY, "b": UNLOADED, "c": READY}
        assert made.host.reserved_bytes == 90 * MIB
        assert not made.engines["b"].stats().is_ready, "its process has ended"
        assert made["b"].reserved_bytes == 0
        assert made["b"].resident_bytes is None


async def test_pinned_and_busy_models_keep_their_room(tmp_path: Path) -> None:
    made = Bench(tmp_path, (model("a", is_pinned=True), model("b")))
    made.speeds = FakeSpeeds(prefill_tokens_per_second=1.0)
    async with running(made):
        await until(lambda: made["a"].is_ready and made["b"].is_ready)
        made.ask("b")
        await until(lambda: made["b"].has_requests)
        with pytest.raises(MemoryBudgetError, match=r"a .40 MiB, pinned., b .30 MiB, busy."):
            await made.host.load("c")
        made.host.pin("a", False)
        await made.host.load("c")
        assert made.phases() == {"a": UNLOADED, "b": READY, "c": READY}
        made.desk.cancel_all()
        await until(lambda: not made.desk.running_requests)


async def test_model_that_takes_more_than_its_estimate_is_given_up(tmp_path: Path) -> None:
    async with running(Bench(tmp_path, (model("a"),))) as made:
        await until(lambda: made["a"].is_ready)
        made.host.pin("a", True)
        with pytest.raises(MemoryBudgetError, match="liar needs about 90 MiB"):
            await made.host.load("liar")
        assert not made.engines["liar"].stats().is_ready


async def test_unloading_lets_running_answers_end_and_takes_nothing_new(tmp_path: Path) -> None:
    made = Bench(tmp_path, (model("a"),), speeds=FakeSpeeds(decode_tokens_per_second=200.0))
    async with running(made):
        await until(lambda: made["a"].is_ready)
        made.ask("a", 30)
        await until(lambda: made["a"].has_requests)
        unloading = asyncio.create_task(made.host.unload("a"))
        await until(lambda: made["a"].phase is UNLOADED)
        assert made["a"].issue == "letting its running answers end"
        made.desk.accept(WorkOrder("late", 1, "a", "Hello", Sampling(), 30.0))
        await unloading
        await until(lambda: len(made.completions) == 2)
        by_id = {completion.request_id: completion for completion in made.completions}
        assert by_id["r0"].outcome in (FinishReason.STOP, FinishReason.LENGTH)
        assert by_id["late"].failure is FailureKind.MODEL_NOT_LOADED
        assert not made.engines["a"].stats().is_ready
        await asyncio.sleep(0)
        assert made["a"].phase is UNLOADED, "nobody loads it again by himself"


async def test_answers_that_do_not_end_in_time_are_given_up(tmp_path: Path) -> None:
    memory = MemorySettings(budget_bytes=100 * MIB, drain_seconds=0.0)
    made = Bench(tmp_path, (model("a"),), memory, speeds=FakeSpeeds(prefill_tokens_per_second=0.1))
    async with running(made):
        await until(lambda: made["a"].is_ready)
        made.ask("a")
        await until(lambda: made["a"].has_requests)
        await made.host.unload("a")
        await until(lambda: made.completions)
        assert made.completions[0].failure is FailureKind.ENGINE_CRASHED


async def test_request_brings_back_an_unloaded_model(tmp_path: Path) -> None:
    async with running(Bench(tmp_path, (model("a", load_at_start=False),))) as made:
        assert made["a"].phase is UNLOADED
        made.ask("a")
        await until(lambda: made.completions)
        assert made.completions[0].outcome is FinishReason.LENGTH
        assert made["a"].is_ready


async def test_requests_for_two_models_do_not_swap_them_for_ever(tmp_path: Path) -> None:
    """What was used just now keeps its room, so the other request goes elsewhere."""
    made = Bench(tmp_path, (model("a"), model("c"), model("b", load_at_start=False)))
    async with running(made):
        await until(lambda: made["a"].is_ready and made["c"].is_ready)
        made.ask("b")
        await until(lambda: made.completions)
        assert made.completions[0].failure is FailureKind.MODEL_NOT_LOADED
        assert "just used" in made.completions[0].message
        assert made.phases() == {"a": READY, "c": READY, "b": UNLOADED}
        made.now += 31.0
        made.ask("b")
        await until(lambda: len(made.completions) == 2)
        assert made.completions[1].outcome is FinishReason.LENGTH
        assert made["b"].is_ready


async def test_idle_model_is_unloaded_and_a_pinned_one_is_not(tmp_path: Path) -> None:
    memory = MemorySettings(budget_bytes=100 * MIB, idle_seconds=300.0)
    made = Bench(tmp_path, (model("a"), model("b", is_pinned=True)), memory)
    async with running(made):
        await until(lambda: made["a"].is_ready and made["b"].is_ready)
        made.now += 301.0
        await until(lambda: made["a"].phase is UNLOADED)
        assert made["b"].is_ready


async def test_loading_with_other_slots_loads_anew(tmp_path: Path) -> None:
    async with running(Bench(tmp_path, (model("a"),))) as made:
        await until(lambda: made["a"].is_ready)
        first = made.engines["a"]
        await made.host.load("a")
        assert made.engines["a"] is first
        await made.host.load("a", slots=3, context_tokens=512)
        assert made.engines["a"].settings.slots == 3
        assert made.engines["a"].settings.context_tokens == 512
        assert not first.stats().is_ready


async def test_order_for_what_nobody_has_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running(Bench(tmp_path, (model("a"),), unknown=frozenset({"b"}))) as made:
        await until(lambda: made["a"].is_ready)
        with pytest.raises(SourcesFailedError):
            await made.host.load("b")
        assert made.phases() == {"a": READY}
        for action in (made.host.unload("b"), made.host.measure("b")):
            with pytest.raises(UnknownModelError, match="b is not on this node; it has: a"):
                await action
        with pytest.raises(UnknownModelError):
            made.host.pin("b", True)


async def test_download_shows_how_far_it_is(tmp_path: Path) -> None:
    seen = []
    made = Bench(tmp_path, (model("a"),))
    made.host.on_change = lambda: seen.append((made["a"].phase, made["a"].progress_ratio))
    async with running(made):
        await until(lambda: made["a"].is_ready)
    assert (ModelPhase.DOWNLOADING, 0.25) in seen
    assert made["a"].progress_ratio is None


async def test_requests_wait_while_a_model_is_measured_anew(tmp_path: Path) -> None:
    """1. measuring begins, 2. a request comes and waits, 3. measuring ends, 4. it is answered."""
    async with running(Bench(tmp_path, (model("a"),))) as made:
        await until(lambda: made["a"].is_ready)
        made.gate = asyncio.Event()
        measuring = asyncio.create_task(made.host.measure("a"))
        await until(lambda: made.measured == ["a", "a"])
        assert made["a"].phase is ModelPhase.LOADING
        made.ask("a")
        await asyncio.sleep(0)
        assert not made.completions
        made.gate.set()
        await measuring
        await until(lambda: made.completions)
        assert made.completions[0].outcome is FinishReason.LENGTH
        assert made["a"].is_ready


async def test_model_that_stays_busy_is_not_measured(tmp_path: Path) -> None:
    made = Bench(tmp_path, (model("a"),), speeds=FakeSpeeds(prefill_tokens_per_second=0.1))
    async with running(made):
        await until(lambda: made["a"].is_ready)
        made.ask("a")
        await until(lambda: made["a"].has_requests)
        measuring = asyncio.create_task(made.host.measure("a"))
        await until(lambda: made["a"].is_measuring)
        made.now += 61.0
        with pytest.raises(ModelBusyError, match="a was busy for 60 s"):
            await measuring
        assert made["a"].is_ready
        assert made.measured == ["a"]
        made.desk.cancel_all()
        await until(lambda: not made.desk.running_requests)


async def test_another_power_mode_is_measured_anew_once(tmp_path: Path) -> None:
    """What a board can do depends on its mode, so speeds are kept by mode."""
    async with running(Bench(tmp_path, (model("a"),))) as made:
        await until(lambda: made["a"].is_ready)
        assert made["a"].speeds is not None
        assert made["a"].speeds.power_mode == "15W"
        made.mode = "MAXN"
        await until(lambda: made.measured_mode("a") == "MAXN" and made["a"].is_ready)
        made.now += 61.0
        made.mode = "15W"
        await until(lambda: made.measured_mode("a") == "15W")
        assert made.measured == ["a", "a"], "what was measured in a mode is kept"


async def test_joules_of_a_token_are_measured_with_the_speed(tmp_path: Path) -> None:
    async def measure_energy(engine: InferenceEngine, slots: int) -> TokenEnergy | None:
        assert slots == 2
        return TokenEnergy(0.1, 0.5, 12.0)

    made = Bench(tmp_path, (model("a"),), measure_energy=measure_energy)
    async with running(made):
        await until(lambda: made["a"].is_ready)
    speeds = made["a"].speeds
    assert speeds is not None
    assert (speeds.prefill_joules_per_token, speeds.decode_joules_per_token) == (0.1, 0.5)
    assert (speeds.load_watts, speeds.measured_slots) == (12.0, 2)


async def test_new_settings_add_remove_and_reload_models(tmp_path: Path) -> None:
    async with running(Bench(tmp_path, (model("a"), model("b")))) as made:
        await until(lambda: made["a"].is_ready and made["b"].is_ready)
        kept = made.engines["b"]
        changed = replace(
            made.host.settings,
            models=(model("b", is_pinned=True, request_usd=0.5), model("c", slots=1)),
        )
        await made.host.apply(changed)
        await until(lambda: made["c"].is_ready)
        assert set(made.host.models) == {"b", "c"}
        assert made.engines["b"] is kept, "a price or a pin is no reason to load anew"
        assert made["b"].is_pinned
        assert made["b"].settings.request_usd == 0.5
        await made.host.apply(replace(changed, models=(model("b", slots=4), model("c", slots=1))))
        await until(lambda: made["b"].is_ready)
        assert made.engines["b"].settings.slots == 4
        assert not kept.stats().is_ready


async def test_what_an_order_pushed_out_stays_out_over_a_restart(tmp_path: Path) -> None:
    made = Bench(tmp_path, (model("a"), model("b")))
    async with running(made):
        await until(lambda: made["a"].is_ready and made["b"].is_ready)
        made["a"].used(500.0)
        made["b"].used(400.0)
        await made.host.load("c", slots=1)
        made.host.pin("a", True)
    async with running(Bench(tmp_path, (model("a"), model("b")))) as again:
        await until(lambda: again["a"].is_ready and again["c"].is_ready)
        assert again.phases() == {"a": READY, "b": UNLOADED, "c": READY}
        assert again["a"].is_pinned
        assert again.engines["c"].settings.slots == 1
        edited = replace(again.host.settings, models=(model("a"), model("b", slots=1)))
        await again.host.unload("c")
        await again.host.apply(edited)
        await until(lambda: again["b"].is_ready)
    async with running(Bench(tmp_path, (model("a"), model("b", slots=1)))) as third:
        assert set(third.host.models) == {"a", "b"}
        await until(lambda: third["a"].is_ready and third["b"].is_ready)
        assert third["a"].is_pinned


async def test_what_a_request_or_idleness_unloaded_is_loaded_at_the_next_start(
    tmp_path: Path,
) -> None:
    memory = MemorySettings(budget_bytes=100 * MIB, idle_seconds=300.0)
    made = Bench(tmp_path, (model("a"), model("c"), model("b", load_at_start=False)), memory)
    async with running(made):
        await until(lambda: made["a"].is_ready and made["c"].is_ready)
        made.now += 31.0
        made.ask("b")
        await until(lambda: made.completions)
        made["b"].used(made.now)  # the desk goes by the real clock
        made.now += 301.0
        await until(lambda: set(made.phases().values()) == {UNLOADED})
    again = Bench(tmp_path, made.models, memory)
    assert {name for name, found in again.host.models.items() if found.is_wanted} == {"a", "c"}


@pytest.mark.parametrize(
    ("memory", "budget"),
    [
        (MemorySettings(reserve_bytes=1 << 30), 7 << 30),
        (MemorySettings(budget_ratio=0.25), 4 << 30),
        (MemorySettings(budget_bytes=5), 5),
        (MemorySettings(reserve_bytes=1 << 40), 0),
    ],
)
def test_budget_is_given_else_a_share_else_what_is_free(
    tmp_path: Path, memory: MemorySettings, budget: int
) -> None:
    made = Bench(tmp_path, (), memory, available_bytes=8 << 30, total_bytes=16 << 30)
    assert made.host.budget_bytes == budget


async def test_closed_engine_answers_nothing() -> None:
    engine = SizedEngine(EngineSettings(Path("/models/a.gguf")))
    await engine.load()
    await engine.close()
    with pytest.raises(EngineError):
        await anext(aiter(engine.generate(GenerationRequest("r", "Hello"))))
