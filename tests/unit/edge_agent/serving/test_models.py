import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edge_agent.config import ModelSettings, Settings
from edge_agent.engine.base import EngineSettings, InferenceEngine
from edge_agent.engine.fake import FakeEngine
from edge_agent.engine.spec import PreparedModel
from edge_agent.errors import EngineError, EngineFailure, SourcesFailedError
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.lifecycle import Failed, ModelPhase
from edge_agent.serving.models import ModelHost
from tests.fakes.engines import engines_with
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio

SPEEDS = Speeds(100.0, 10.0, 20.0)
MEASURED = Speeds(100.0, 10.0, 20.0, measured_slots=2, engine_version="fake")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Bench:
    """A model host whose files, engines and measurements are pretended."""

    folder: Path
    models: tuple[ModelSettings, ...] = (ModelSettings("small", slots=2, threads=1),)
    prepare_failure: Exception | None = None
    load_failure: EngineError | None = None
    calibrate_failure: Exception | None = None
    engines: list[FakeEngine] = field(default_factory=list)
    calibrations: int = 0
    gate: asyncio.Event | None = None
    changes: int = 0
    told: list[str] = field(default_factory=list)
    host: ModelHost = field(init=False)

    def __post_init__(self) -> None:
        self.host = ModelHost(
            Settings(node_id="pi", data_dir=self.folder, models=self.models),
            self.prepare,
            self.calibrate,
            self.changed,
            engines_with(self.make_engine),
        )

    async def prepare(self, name: str, report: Callable[[str], None]) -> PreparedModel:
        report("downloading (50 %)")
        if self.prepare_failure is not None:
            raise self.prepare_failure
        return PreparedModel(
            Path(f"/nowhere/{name}.gguf"), f"digest of {name}", "llama", 0.1, "Q4_0", 8192, None
        )

    def make_engine(self, settings: EngineSettings) -> InferenceEngine:
        engine = FakeEngine(settings, load_failure=self.load_failure)
        self.engines.append(engine)
        return engine

    async def calibrate(self, engine: InferenceEngine, slots: int) -> Speeds:
        self.calibrations += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.calibrate_failure is not None:
            raise self.calibrate_failure
        return SPEEDS

    def changed(self) -> None:
        self.changes += 1
        self.told += [model.issue for model in self.host.models.values() if model.issue]

    def model(self, name: str = "small") -> HostedModel:
        return self.host.models[name]


@asynccontextmanager
async def running(made: Bench) -> AsyncIterator[Bench]:
    task = asyncio.create_task(made.host.run())
    try:
        yield made
        assert not task.done(), "the host must outlive its models"
    finally:
        task.cancel()
        await asyncio.wait([task])
        await made.host.close()


async def test_model_is_prepared_loaded_measured_and_ready(tmp_path: Path) -> None:
    async with running(Bench(tmp_path)) as made:
        await until(lambda: made.model().is_ready)
        model = made.model()
        assert (model.phase, model.issue, model.speeds) == (ModelPhase.READY, "", MEASURED)
        assert made.told == [
            "preparing the model file",
            "downloading (50 %)",
            "loading",
            "measuring its speed",
        ]
        (engine,) = made.engines
        assert engine.settings.slots == 2
        assert engine.settings.context_tokens == 4096
    assert not engine.stats().is_ready
    assert made.model().engine is None


async def test_measured_speeds_are_kept_for_the_same_conditions_only(tmp_path: Path) -> None:
    for expected in (1, 0):
        async with running(Bench(tmp_path)) as made:
            await until(lambda made=made: made.model().is_ready)
        assert made.calibrations == expected
        assert made.model().speeds == MEASURED
    other = Bench(tmp_path, (ModelSettings("small", slots=3, threads=1),))
    async with running(other):
        await until(lambda: other.model().is_ready)
    assert other.calibrations == 1
    kept = json.loads((tmp_path / "calibrations.json").read_text())
    assert len(kept) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"x": {"speed": 1}}', '{"x": 5}'])
async def test_damaged_measurements_are_made_anew(tmp_path: Path, damage: str) -> None:
    (tmp_path / "calibrations.json").write_text(damage)
    async with running(Bench(tmp_path)) as made:
        await until(lambda: made.model().is_ready)
    assert made.calibrations == 1


@pytest.mark.parametrize(
    ("failure", "issue"),
    [
        (
            {"prepare_failure": SourcesFailedError("no source works")},
            "model_unavailable: no source",
        ),
        (
            {"load_failure": EngineError(EngineFailure.OUT_OF_MEMORY, "needs 9 GB")},
            "out_of_memory: needs 9 GB",
        ),
        (
            {"load_failure": EngineError(EngineFailure.MISSING_FILE, "gone")},
            "model_file_missing: gone",
        ),
        (
            {"calibrate_failure": EngineError(EngineFailure.STALLED, "no progress")},
            "stalled: no progress",
        ),
        ({"calibrate_failure": ValueError("a bug")}, "model_load_failed: ValueError"),
    ],
)
async def test_model_that_cannot_be_had_is_an_issue_and_its_engine_is_closed(
    tmp_path: Path, failure: dict[str, Any], issue: str
) -> None:
    """With its cause."""
    models = (ModelSettings("small"), ModelSettings("other"))
    made = Bench(tmp_path, models, **failure)
    async with running(made):
        await until(lambda: made.model("other").phase is ModelPhase.FAILED)
        for name in ("small", "other"):
            assert made.model(name).issue.startswith(issue)
            assert not made.model(name).is_ready
        assert not any(engine.stats().is_ready for engine in made.engines)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [(EngineFailure.CRASHED, 5.0), (EngineFailure.OUT_OF_MEMORY, 30.0)],
)
async def test_model_that_wants_memory_is_left_alone_for_longer(
    tmp_path: Path, kind: EngineFailure, seconds: float
) -> None:
    """Its node cools down for it."""
    made = Bench(tmp_path, load_failure=EngineError(kind, "why"))
    made.host.clock = lambda: 1000.0
    async with running(made):
        await until(lambda: made.model().phase is ModelPhase.FAILED)
        assert made.model().failure is kind
        stage = made.model().life.stage
        assert isinstance(stage, Failed)
        assert stage.retry_at == 1000.0 + seconds


async def test_state_of_a_loaded_engine_is_followed_both_ways(tmp_path: Path) -> None:
    async with running(Bench(tmp_path)) as made:
        await until(lambda: made.model().is_ready)
        changes = made.changes
        made.engines[0].fail(EngineError(EngineFailure.CRASHED, "died by signal 9"))
        await until(lambda: made.model().phase is ModelPhase.FAILED)
        assert "signal 9" in made.model().issue
        assert made.changes == changes + 1
        assert made.model().failure is EngineFailure.CRASHED
        made.engines[0].recover()
        await until(lambda: made.model().is_ready)
        assert made.model().issue == ""
        assert made.model().failure is None
        assert made.changes == changes + 2


async def test_stopping_while_a_model_loads_closes_its_engine(tmp_path: Path) -> None:
    made = Bench(tmp_path, gate=asyncio.Event())
    async with running(made):
        await until(lambda: made.calibrations)
        assert made.engines[0].stats().is_ready
    assert not made.engines[0].stats().is_ready
