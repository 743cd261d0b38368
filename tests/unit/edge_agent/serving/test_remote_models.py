from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from edge_agent.config import ModelSettings, Settings
from edge_agent.engine.base import InferenceEngine, Rates
from edge_agent.engine.registry import spec_of
from edge_agent.engine.remote.endpoint import RemoteError, RemoteIssue
from edge_agent.engine.remote.engine import OpenAiEngine
from edge_agent.engine.remote.settings import OpenAiSettings, RemoteSettings
from edge_agent.engine.remote.spec import RemoteSpec
from edge_agent.engine.spec import PreparedModel
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.lifecycle import ModelPhase
from edge_agent.serving.models import ModelHost
from edge_agent.serving.prepare import ModelPreparer

REMOTE = RemoteSettings(
    "https://api.example.com/v1/",
    "vendor/large",
    api_key_file="/etc/key",
    parameters_billions=70.0,
    decode_tokens_per_second=60.0,
)
LARGE = ModelSettings("large", slots=8, remote=REMOTE)


def ignore(text: str, progress_ratio: float | None = None, is_downloading: bool = False) -> None:
    """Is told how it goes, and forgets it."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_settings_of_a_remote_model_become_the_engines() -> None:
    assert RemoteSpec(REMOTE).engine_settings(LARGE) == OpenAiSettings(
        base_url="https://api.example.com/v1/",
        model="vendor/large",
        slots=8,
        api_key_file="/etc/key",
        declared=Rates(decode=60.0),
    )


@pytest.mark.parametrize(
    ("model", "is_measured"),
    [
        (LARGE, True),
        (replace(LARGE, completion_usd_per_token=1e-6), False),
        (replace(LARGE, request_usd=0.01), False),
        (replace(LARGE, remote=replace(REMOTE, calibrate=False)), False),
    ],
)
def test_what_costs_money_is_not_measured(model: ModelSettings, is_measured: bool) -> None:
    assert model.remote is not None
    assert RemoteSpec(model.remote).engine_settings(model).is_measured is is_measured


@pytest.mark.anyio
async def test_remote_model_needs_no_catalogue_entry_and_no_file(tmp_path: Path) -> None:
    async def prepared_by(model: ModelSettings) -> PreparedModel:
        fetch = ModelPreparer(Settings(data_dir=tmp_path, models=(model,)))
        return await spec_of(model).prepare(model, fetch, ignore)

    prepared = await prepared_by(LARGE)
    assert prepared.path is None
    assert (prepared.family, prepared.parameters_billions) == ("large", 70.0)
    assert prepared.quantisation == "F16"
    other = replace(LARGE, remote=replace(REMOTE, model="vendor/other"))
    assert (await prepared_by(other)).digest != prepared.digest
    assert not any(tmp_path.iterdir())


@pytest.mark.anyio
async def test_endpoint_that_cannot_be_used_is_shown_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: OpenAiEngine) -> None:
        raise RemoteError(RemoteIssue.KEY_REFUSED, "Put a valid key in /etc/key.")

    monkeypatch.setattr(OpenAiEngine, "load", refuse)

    async def no_calibration(engine: InferenceEngine, slots: int) -> Speeds:
        raise AssertionError("it was not loaded")

    async def no_file(name: str, report: object) -> PreparedModel:
        raise AssertionError("a remote model has no file")

    told: list[str] = []
    settings = Settings(data_dir=tmp_path, models=(LARGE,))
    host = ModelHost(
        settings, no_file, no_calibration, lambda: told.append(host.models["large"].issue)
    )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host.run)
        with anyio.fail_after(60):
            while host.models["large"].phase is not ModelPhase.FAILED:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert told == [
        "asking the remote endpoint",
        "trying out the remote endpoint",
        "remote_key_refused: Put a valid key in /etc/key.",
    ]
