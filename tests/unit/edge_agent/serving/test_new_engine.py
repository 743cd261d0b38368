"""An engine of a new kind needs its own file and a row of the registry, and nothing else."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from edge_agent.config import ModelSettings, Settings
from edge_agent.engine.base import EngineSettings, InferenceEngine, LoadedModel, Rates
from edge_agent.engine.fake import FakeEngine
from edge_agent.engine.registry import ENGINES, spec_of
from edge_agent.engine.spec import (
    EngineSpec,
    FetchModel,
    ModelEntry,
    PreparedModel,
    Report,
    Shelf,
)
from edge_agent.findings import Finding
from edge_agent.link.convert import model_to_proto
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.models import ModelHost
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio

RATES = Rates(900.0, 90.0, 180.0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Oracle(FakeEngine):
    """Says how fast it is, so that nobody measures it."""

    async def load(self) -> LoadedModel:
        return replace(await super().load(), declared_rates=RATES)


@dataclass(frozen=True, slots=True)
class OracleSpec(EngineSpec):
    """The file of the new kind."""

    name: ClassVar[str] = "oracle"
    uses_this_machine: ClassVar[bool] = False
    loading_text: ClassVar[str] = "consulting the oracle"

    async def prepare(self, entry: ModelEntry, fetch: FetchModel, report: Report) -> PreparedModel:
        return PreparedModel(None, "delphi", "oracle", 1.0, "F16", 512, None)

    def make(self, entry: ModelEntry, prepared: PreparedModel) -> InferenceEngine:
        return Oracle(EngineSettings(Path("nowhere"), slots=entry.slots))

    async def examine(self, entry: ModelEntry, shelf: Shelf) -> list[Finding]:
        return [Finding("oracle", "ok", "she is in")]


ROWS = (lambda entry: OracleSpec() if entry.name == "pythia" else None, *ENGINES)


async def test_model_of_a_new_kind_is_loaded_told_of_and_closed(tmp_path: Path) -> None:
    async def no_file(name: str, report: Report) -> PreparedModel:
        raise AssertionError("it has none")

    async def no_calibration(engine: InferenceEngine, slots: int) -> Speeds:
        raise AssertionError("it said how fast it is")

    entry = ModelSettings("pythia", slots=3)
    host = ModelHost(
        Settings(data_dir=tmp_path, models=(entry,)), no_file, no_calibration, lambda: None, ROWS
    )
    running = asyncio.create_task(host.run())
    try:
        await until(lambda: host.models["pythia"].is_ready)
        model = host.models["pythia"]
        assert model.speeds is not None
        assert model.speeds.saturated_decode_tokens_per_second == 180.0
        message = model_to_proto(model)
        assert (message.digest, message.slots, message.refuses_raw_prompts) == ("delphi", 3, False)
        await host.unload("pythia")
        assert model.engine is None
    finally:
        running.cancel()
        await asyncio.wait([running])
        await host.close()


def test_models_of_other_kinds_are_not_the_new_ones() -> None:
    assert spec_of(ModelSettings("small"), ROWS).name == "llama"
