"""The models of this node: from a name in the settings to a loaded, measured engine."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Protocol

import structlog

from edge_agent.config import ModelSettings, Settings
from edge_agent.engine.base import EngineSettings, InferenceEngine, LoadedModel
from edge_agent.engine.openai import OpenAiEngine, OpenAiSettings, Rates
from edge_agent.engine.openai_endpoint import RemoteError
from edge_agent.errors import AgentError, EngineError, EngineFailure
from edge_agent.identity import usable_cores
from edge_agent.lifecycle import ModelPhase

log = structlog.get_logger()

_CALIBRATION_METHOD: Final = 1
"""Raised when speeds are measured in another way, so that kept ones are measured anew."""

_RETRY_SECONDS: Final = (5.0, 15.0, 60.0)
"""Waits before a model that could not be loaded is tried again; the last one repeats."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured on this node, tokens per second; see bench.calibrate."""

    prefill_rate: float
    decode_rate: float
    saturated_decode_rate: float


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A verified file and what the catalogue says of it, or a remote model and its settings.

    Attributes:
        path: None for a remote model.
        digest: of the file; for a remote model of where it is.
        context_tokens: 0 for a remote model whose settings do not say.
        chat_template: overrides the file's own; None uses the file's.
        is_base_model: not tuned to follow instructions.
    """

    path: Path | None
    digest: str
    family: str
    parameters_billions: float
    quantisation: str
    context_tokens: int
    chat_template: str | None
    is_base_model: bool = False


class PrepareModel(Protocol):
    """Finds, fetches and verifies a model's file."""

    async def __call__(self, name: str, report: Callable[[str], None]) -> PreparedModel:
        """Prepare a model; `report` is told in words how it goes.

        Raises:
            ModelError: it cannot be had.
        """
        ...


MakeEngine = Callable[[EngineSettings], InferenceEngine]
MakeRemoteEngine = Callable[[OpenAiSettings], OpenAiEngine]
Calibrate = Callable[[InferenceEngine, int], Awaitable[Speeds]]


@dataclass(slots=True)
class HostedModel:
    """One model of this node; `issue` says what is wrong, or what is being done while loading."""

    settings: ModelSettings
    phase: ModelPhase = ModelPhase.LOADING
    issue: str = ""
    prepared: PreparedModel | None = None
    loaded: LoadedModel | None = None
    speeds: Speeds | None = None
    engine: InferenceEngine | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it can answer."""
        return self.phase is ModelPhase.READY and self.engine is not None


@dataclass(slots=True)
class ModelHost:
    """Loads the models of the settings one after the other and keeps them loaded.

    Attributes:
        on_change: called after each change of what the controller is told.
        make_remote_engine: what asks a remote endpoint.
    """

    settings: Settings
    prepare: PrepareModel
    make_engine: MakeEngine
    calibrate: Calibrate
    on_change: Callable[[], None]
    make_remote_engine: MakeRemoteEngine = OpenAiEngine
    models: dict[str, HostedModel] = field(init=False)

    def __post_init__(self) -> None:
        self.models = {model.name: HostedModel(model) for model in self.settings.models}

    async def run(self) -> None:
        """Load everything, then watch over the engines, until cancelled."""
        failures = dict.fromkeys(self.models, 0)
        retry_at = dict.fromkeys(self.models, 0.0)
        loop = asyncio.get_running_loop()
        while True:
            for name, model in self.models.items():
                if model.engine is None and loop.time() >= retry_at[name]:
                    # One at a time: two loads at once would fight for memory and disk.
                    if await self._load(model):
                        failures[name] = 0
                    else:
                        wait = _RETRY_SECONDS[min(failures[name], len(_RETRY_SECONDS) - 1)]
                        failures[name] += 1
                        retry_at[name] = loop.time() + wait
                elif model.engine is not None:
                    self._follow(model, model.engine)
            await asyncio.sleep(0.25)

    async def close(self) -> None:
        """Unload everything."""
        for model in self.models.values():
            if model.engine is not None:
                await model.engine.close()
                model.engine = None

    async def _load(self, model: HostedModel) -> bool:
        def report(text: str) -> None:
            model.issue = text
            self.on_change()

        model.phase = ModelPhase.LOADING
        is_remote = model.settings.remote is not None
        report("asking the remote endpoint" if is_remote else "preparing the model file")
        engine: InferenceEngine | None = None
        try:
            model.prepared = await self.prepare(model.settings.name, report)
            report("trying out the remote endpoint" if is_remote else "loading")
            if is_remote:
                engine = self.make_remote_engine(remote_engine_settings(model.settings))
            else:
                engine = self.make_engine(self._engine_settings(model, model.prepared))
            model.loaded = await engine.load()
            report("measuring its speed")
            model.speeds = await self._speeds(model, engine, model.loaded)
        except AgentError as error:
            await self._give_up(model, engine, _issue_of(error))
            return False
        except asyncio.CancelledError:
            if engine is not None:
                await engine.close()
            raise
        except Exception as error:
            log.exception("model.load_failed", model=model.settings.name)
            await self._give_up(model, engine, f"model_load_failed: {type(error).__name__}")
            return False
        model.engine = engine
        model.phase = ModelPhase.READY
        model.issue = model.loaded.template_issue or ""
        log.info(
            "model.loaded",
            model=model.settings.name,
            decode_rate=round(model.speeds.decode_rate, 1),
            saturated_decode_rate=round(model.speeds.saturated_decode_rate, 1),
            prefill_rate=round(model.speeds.prefill_rate, 1),
        )
        self.on_change()
        return True

    async def _give_up(
        self, model: HostedModel, engine: InferenceEngine | None, issue: str
    ) -> None:
        if engine is not None:
            await engine.close()
        model.phase, model.issue = ModelPhase.FAILED, issue
        log.error("model.failed", model=model.settings.name, issue=issue)
        self.on_change()

    def _follow(self, model: HostedModel, engine: InferenceEngine) -> None:
        """Show what became of a loaded engine; it restarts its own child."""
        stats = engine.stats()
        phase = ModelPhase.READY if stats.is_ready else ModelPhase.FAILED
        template = model.loaded.template_issue if model.loaded else None
        issue = stats.issue or template or ""
        if (phase, issue) != (model.phase, model.issue):
            model.phase, model.issue = phase, issue
            self.on_change()

    def _engine_settings(self, model: HostedModel, prepared: PreparedModel) -> EngineSettings:
        wanted = model.settings
        assert prepared.path is not None  # only a remote model has none
        return EngineSettings(
            model_path=prepared.path,
            context_tokens=wanted.context_tokens or min(prepared.context_tokens, 4096),
            slots=wanted.slots,
            threads=wanted.threads or default_threads(),
            gpu_layers=wanted.gpu_layers,
            cpu_share_ratio=wanted.cpu_share_ratio,
            chat_template=prepared.chat_template,
        )

    async def _speeds(
        self, model: HostedModel, engine: InferenceEngine, loaded: LoadedModel
    ) -> Speeds:
        """Measured before under the same conditions, or measured now and kept."""
        assert model.prepared is not None
        declared = Rates()
        measured = engine
        if isinstance(engine, OpenAiEngine):
            if engine.known_rates is not None:
                return Speeds(*engine.known_rates)
            declared = engine.settings.declared
            measured = engine.for_measuring()
        key = self._calibration_key(model, model.prepared, loaded)
        path = self.settings.data_dir / "calibrations.json"
        kept = _read_calibrations(path)
        if key not in kept:
            kept = {**kept, key: await self.calibrate(measured, model.settings.slots)}
            _write_calibrations(path, kept)
        speeds = kept[key]
        return Speeds(
            declared.prefill or speeds.prefill_rate,
            declared.decode or speeds.decode_rate,
            declared.saturated_decode or speeds.saturated_decode_rate,
        )

    def _calibration_key(
        self, model: HostedModel, prepared: PreparedModel, loaded: LoadedModel
    ) -> str:
        """All that a measured speed depends on."""
        conditions = [
            f"method={_CALIBRATION_METHOD}",
            prepared.digest,
            loaded.engine_version,
            f"slots={model.settings.slots}",
        ]
        if model.settings.remote is None:
            settings = self._engine_settings(model, prepared)
            conditions += [
                f"threads={settings.threads}",
                f"gpu={settings.gpu_layers}",
                f"share={settings.cpu_share_ratio:g}",
                f"context={settings.context_tokens}",
            ]
        return "/".join(conditions)


def remote_engine_settings(model: ModelSettings) -> OpenAiSettings:
    """How a remote model is asked. One that costs money is not measured beyond one small request.

    Args:
        model: with `remote`.
    """
    remote = model.remote
    assert remote is not None
    return OpenAiSettings(
        base_url=remote.base_url,
        model=remote.model,
        slots=model.slots,
        context_tokens=remote.context_tokens or model.context_tokens,
        api_key_file=remote.api_key_file,
        api_key_env=remote.api_key_env,
        has_chat_template=not remote.is_base_model,
        supports_raw_prompts=remote.supports_raw_prompts,
        omit_parameters=remote.omit_parameters,
        first_token_seconds=remote.first_token_seconds,
        is_measured=remote.calibrate and not model.has_price,
        declared=Rates(
            remote.prefill_tokens_per_second,
            remote.decode_tokens_per_second,
            remote.saturated_decode_tokens_per_second,
        ),
    )


def default_threads() -> int:
    """All cores but one, which stays with the agent (case P3)."""
    return max(1, usable_cores() - 1)


def _issue_of(error: AgentError) -> str:
    if isinstance(error, RemoteError):
        return f"{error.issue.value}: {error}"
    if isinstance(error, EngineError):
        name = (
            "model_file_missing" if error.kind is EngineFailure.MISSING_FILE else error.kind.value
        )
        return f"{name}: {error}"
    return f"model_unavailable: {error}"


def _read_calibrations(path: Path) -> dict[str, Speeds]:
    """Kept measurements; a damaged file is measured anew, since nothing else is lost with it."""
    try:
        return {key: Speeds(**value) for key, value in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_calibrations(path: Path, calibrations: dict[str, Speeds]) -> None:
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(
            json.dumps({key: asdict(speeds) for key, speeds in calibrations.items()}, indent=1)
        )
        partial.replace(path)
    except OSError as error:
        log.warning("calibration.not_kept", path=str(path), error=error.strerror)
