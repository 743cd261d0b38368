from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from edge_agent.config import ModelSettings, RemoteSettings, Settings
from edge_agent.engine.base import EngineSettings, InferenceEngine
from edge_agent.engine.remote.endpoint import RemoteError, RemoteIssue
from edge_agent.engine.remote.engine import OpenAiEngine, OpenAiSettings, Rates
from edge_agent.lifecycle import ModelPhase
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.engine_settings import remote_engine_settings
from edge_agent.serving.hosted import PreparedModel
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
    assert remote_engine_settings(LARGE) == OpenAiSettings(
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
    assert remote_engine_settings(model).is_measured is is_measured


@pytest.mark.anyio
async def test_remote_model_needs_no_catalogue_entry_and_no_file(tmp_path: Path) -> None:
    prepare = ModelPreparer(Settings(data_dir=tmp_path, models=(LARGE,)))
    prepared = await prepare("large", ignore)
    assert prepared.path is None
    assert (prepared.family, prepared.parameters_billions) == ("large", 70.0)
    assert prepared.quantisation == "F16"
    other = replace(LARGE, remote=replace(REMOTE, model="vendor/other"))
    elsewhere = ModelPreparer(Settings(data_dir=tmp_path, models=(other,)))
    assert (await elsewhere("large", ignore)).digest != prepared.digest
    assert not any(tmp_path.iterdir())


@pytest.mark.anyio
async def test_endpoint_that_cannot_be_used_is_shown_under_its_own_name(tmp_path: Path) -> None:
    class Refused(OpenAiEngine):
        async def load(self) -> None:  # type: ignore[override] # never gets that far
            raise RemoteError(RemoteIssue.KEY_REFUSED, "Put a valid key in /etc/key.")

    def no_engine(settings: EngineSettings) -> InferenceEngine:
        raise AssertionError("a remote model is not loaded here")

    async def no_calibration(engine: InferenceEngine, slots: int) -> Speeds:
        raise AssertionError("it was not loaded")

    async def prepare(name: str, report: object) -> PreparedModel:
        return PreparedModel(None, "remote", "large", 70.0, "F16", 0, None)

    told: list[str] = []
    settings = Settings(data_dir=tmp_path, models=(LARGE,))
    host = ModelHost(
        settings,
        prepare,
        no_engine,
        no_calibration,
        lambda: told.append(host.models["large"].issue),
        make_remote_engine=Refused,
    )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host.run)
        with anyio.fail_after(5):
            while host.models["large"].phase is not ModelPhase.FAILED:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert told == [
        "asking the remote endpoint",
        "trying out the remote endpoint",
        "remote_key_refused: Put a valid key in /etc/key.",
    ]
