"""The agent's settings: one TOML file, overridden by environment, overridden by flags."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from edge_agent.errors import UsageError
from edge_agent.limits import limit_problems
from edge_agent.settings_table import REQUIRED, TableReader, put, read_toml

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Where the controller is.

    Attributes:
        address: Address (host:port) of the controller.
        insecure: Connect without TLS. Only for one machine or a trusted network.
        ca_file: PEM file of the authority to trust. Empty: the system's authorities.
        server_name: Name expected in the certificate, if it differs from the address.
    """

    address: str = ""
    insecure: bool = False
    ca_file: str = ""
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class PowerSettings:
    """Power of the whole board; both or neither. Without them a table of boards is asked.

    Attributes:
        idle_watts: Power of the idle board.
        max_watts: Power of the fully busy board.
        transmit_watts: Extra power while the link transmits.
        receive_watts: Extra power while the link receives.
        pmic_scale: Factor from a Pi 5's measured rails to its whole power. Unset: 1.145.
        pmic_offset_watts: Power of a Pi 5 outside its measured rails. Unset: 0.588.
    """

    idle_watts: float | None = None
    max_watts: float | None = None
    transmit_watts: float | None = None
    receive_watts: float | None = None
    pmic_scale: float | None = None
    pmic_offset_watts: float | None = None


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Memory that loaded models may take together, and when they give it back.

    Attributes:
        budget_bytes: Maximum memory for models. 0: see budget_ratio.
        budget_ratio: Maximum share of the machine's memory for models. 0: the memory available at
            the start, less the reserve.
        reserve_bytes: Memory kept free for other programs when neither limit is set.
        idle_seconds: Idle time after which a model is unloaded. 0: never.
        drain_seconds: Time for running answers to end when their model is unloaded.
    """

    budget_bytes: int = 0
    budget_ratio: float = 0.0
    reserve_bytes: int = 268_435_456
    idle_seconds: float = 0.0
    drain_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """An OpenAI-compatible server that answers for a model, which then needs no file here.

    Attributes:
        base_url: Address of the server, up to and including /v1, such as
            "http://gpu-server:8080/v1". Required.
        model: Model name on the server. Empty: its only model.
        api_key_file: File with the API key. Read for each request.
        api_key_env: Environment variable with the API key, if there is no file.
        context_tokens: Maximum tokens of prompt plus answer. 0: as the server says, or 4096.
        family: Model family known to routing. Empty: the model's name.
        parameters_billions: Model size, from which routing derives the expected quality. Above 0;
            required.
        quantisation: Quantisation, from which routing derives the expected quality.
        is_base_model: Not tuned to follow instructions: chats are refused.
        supports_raw_prompts: The server has /v1/completions. False: raw prompts are refused.
        supports_response_format: The server respects response_format. False: requests with a
            format are refused.
        omit_parameters: Request parameters that the server refuses, such as ["top_k"].
        first_token_seconds: Maximum time to the first token.
        calibrate: Measure the speed with requests. Models with a price are never measured.
        prefill_tokens_per_second: Prompt tokens read per second. Unset: measured.
        decode_tokens_per_second: Tokens per second of one answer alone. Unset: measured.
        saturated_decode_tokens_per_second: Tokens per second of all slots together. Unset:
            measured.
    """

    base_url: str = field(default="", metadata=REQUIRED)
    model: str = ""
    api_key_file: str = ""
    api_key_env: str = ""
    context_tokens: int = 0
    family: str = ""
    parameters_billions: float = field(default=0.0, metadata=REQUIRED)
    quantisation: str = "F16"
    is_base_model: bool = False
    supports_raw_prompts: bool = True
    supports_response_format: bool = True
    omit_parameters: tuple[str, ...] = ()
    first_token_seconds: float = 300.0
    calibrate: bool = True
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    saturated_decode_tokens_per_second: float | None = None


PREFIX_REUSES: Final = ("off", "session", "system", "any")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model to be served.

    Attributes:
        name: Name in the catalogue. Any name for a remote model.
        slots: Number of sequences decoded at once.
        threads: Number of decoding threads. 0: all cores but one.
        context_tokens: Maximum tokens of prompt plus answer of one sequence. 0: the catalogue's.
        gpu_layers: Number of layers offloaded to a GPU.
        cpu_share_ratio: Share of its threads' time that the model may use. The rest is left to
            other programs.
        prompt_usd_per_token: Price of a prompt token, counted by routing.
        completion_usd_per_token: Price of an answer token, counted by routing.
        request_usd: Price of a request, counted by routing.
        load_at_start: Load the model at the start. False: wait for an order (`models load`).
        is_pinned: Never unload the model to make room or for being idle.
        prefix_reuse: Held keys and values a prompt may start from: off, session (the same
            conversation), system (also the whole system prompt of others) or any. A client can
            time its first token and so learn that somebody has sent the same text.
        remote: the server that answers for it; unset loads the model here.
    """

    name: str = field(metadata=REQUIRED)
    slots: int = 4
    threads: int = 0
    context_tokens: int = 0
    gpu_layers: int = 0
    cpu_share_ratio: float = 1.0
    prompt_usd_per_token: float = 0.0
    completion_usd_per_token: float = 0.0
    request_usd: float = 0.0
    load_at_start: bool = True
    is_pinned: bool = False
    prefix_reuse: str = "system"
    remote: RemoteSettings | None = None

    @property
    def has_price(self) -> bool:
        """Whether an answer costs money."""
        return any((self.prompt_usd_per_token, self.completion_usd_per_token, self.request_usd))


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the agent can be told.

    Attributes:
        node_id: Name of the node. Empty: the host's name.
        kind: Kind of node: edge or cloud.
        hardware: Description of the node for people. Empty: read from the board.
        data_dir: Folder for models, calibrations and the status socket.
        models_dir: Folder for model files. Empty: `data_dir/models`.
        catalog_file: File with a catalogue of your own, added to the packaged one.
        drain_seconds: Time for running answers to end after SIGTERM.
        log_level: Least level logged: debug, info, warning or error.
        controller: where the controller is.
        power: what the board draws.
        memory: what loaded models may take together.
        models: what this node serves.
    """

    node_id: str = ""
    kind: str = "edge"
    hardware: str = ""
    data_dir: Path = Path("~/.local/share/pointsman/agent")
    models_dir: str = ""
    catalog_file: str = ""
    drain_seconds: float = 20.0
    log_level: str = "info"
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    power: PowerSettings = field(default_factory=PowerSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    models: tuple[ModelSettings, ...] = ()

    @property
    def models_path(self) -> Path:
        """Where model files are."""
        return Path(self.models_dir).expanduser() if self.models_dir else self.data_dir / "models"

    @property
    def socket_path(self) -> Path:
        """Where `edge-agent status` asks."""
        return self.data_dir / "status.sock"

    @property
    def control_path(self) -> Path:
        """Where `edge-agent models load` and its like ask."""
        return self.data_dir / "control.sock"

    @property
    def catalog_path(self) -> Path | None:
        """The operator's own catalogue."""
        return Path(self.catalog_file).expanduser() if self.catalog_file else None


def load_settings(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Read, merge and check the settings.

    Args:
        path: the TOML file; None reads none.
        environ: `EDGE_AGENT_` + key in capitals, such as EDGE_AGENT_CONTROLLER_ADDRESS.
        overrides: dotted key to value, from the command line; None values are left out.

    Raises:
        UsageError: with everything that is wrong, one line each.
    """
    try:
        table = read_toml(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    reader = TableReader(splits_texts=False)
    reader.put_variables(table, os.environ if environ is None else environ, "EDGE_AGENT_", Settings)
    for key, given in (overrides or {}).items():
        if given is not None:
            put(table, key, given)
    settings = _complete(reader.build(Settings, table))
    problems = reader.problems + _check(settings)
    if problems:
        raise UsageError("\n".join(problems))
    return settings


def _complete(settings: Settings) -> Settings:
    return replace(
        settings,
        node_id=settings.node_id or socket.gethostname().split(".")[0],
        data_dir=Path(settings.data_dir).expanduser().absolute(),
    )


def _check(settings: Settings) -> list[str]:
    problems = []
    if not _NODE_ID.fullmatch(settings.node_id):
        problems.append(
            f"node_id: letters, digits, dots, dashes and underscores, not {settings.node_id!r}"
        )
    if settings.kind not in ("edge", "cloud"):
        problems.append(f"kind: edge or cloud, not {settings.kind!r}")
    if settings.log_level not in ("debug", "info", "warning", "error"):
        problems.append(f"log_level: debug, info, warning or error, not {settings.log_level!r}")
    if not settings.drain_seconds >= 0:
        problems.append("drain_seconds: 0 or more")
    power = settings.power
    if (power.idle_watts is None) != (power.max_watts is None):
        problems.append("power.idle_watts and power.max_watts belong together")
    for entry in fields(power):
        watts = getattr(power, entry.name)
        if watts is not None and not 0 <= watts < 1e6:
            problems.append(f"power.{entry.name}: 0 or more, not {watts}")
    if power.pmic_scale == 0:
        problems.append("power.pmic_scale: above 0; 1 takes the rails as they are")
    idle, busy = power.idle_watts, power.max_watts
    if idle is not None and busy is not None and idle > busy:
        problems.append("power.max_watts: at least idle_watts")
    problems += [f"memory.{problem}" for problem in _memory_problems(settings.memory)]
    names = [model.name for model in settings.models if model.name]
    problems += [f"models: {name!r} is listed twice" for name in {*names} if names.count(name) > 1]
    for model in settings.models:
        problems += [
            f"models {model.name}: {problem}"
            for problem in limit_problems(model.slots, model.context_tokens, 0)
        ]
        if model.threads < 0 or model.gpu_layers < 0:
            problems.append(f"models {model.name}: threads and gpu_layers are not negative")
        if model.prefix_reuse not in PREFIX_REUSES:
            problems.append(
                f"models {model.name}: prefix_reuse is one of {', '.join(PREFIX_REUSES)}"
            )
        if not 0 < model.cpu_share_ratio <= 1:
            problems.append(f"models {model.name}: cpu_share_ratio above 0, at most 1")
        prices = (model.prompt_usd_per_token, model.completion_usd_per_token, model.request_usd)
        if not all(0 <= price < 1e6 for price in prices):
            problems.append(f"models {model.name}: prices are 0 or more")
        if model.remote is not None:
            label = f"models {model.name}: remote"
            problems += [f"{label}.{problem}" for problem in _remote_problems(model.remote)]
    return problems


def _memory_problems(memory: MemorySettings) -> list[str]:
    problems = [
        f"{name}: 0 or more"
        for name in ("budget_bytes", "reserve_bytes", "idle_seconds", "drain_seconds")
        if not 0 <= getattr(memory, name) < 1e18
    ]
    if not 0 <= memory.budget_ratio <= 1:
        problems.append("budget_ratio: 0 to 1")
    if memory.budget_bytes and memory.budget_ratio:
        problems.append("budget_bytes and budget_ratio: one of them")
    return problems


def _remote_problems(remote: RemoteSettings) -> list[str]:
    problems = []
    url = urlsplit(remote.base_url)
    try:
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if url.username is not None or url.password is not None:
        # Not shown: it is a secret.
        problems.append("base_url: no user or password in it; use api_key_file")
    elif remote.base_url and (not is_address or url.query or url.fragment):
        problems.append(
            f'base_url: an address such as "http://gpu-server:8080/v1", not {remote.base_url!r}'
        )
    if remote.api_key_file and remote.api_key_env:
        problems.append("api_key_file and api_key_env: one of them")
    if remote.api_key_env and not _VARIABLE.fullmatch(remote.api_key_env):
        # Not shown: what stands there in error may be the key itself.
        problems.append("api_key_env: the name of an environment variable, not the key")
    if remote.context_tokens < 0:
        problems.append("context_tokens: 0 or more")
    if not 0 <= remote.parameters_billions < 1e6:
        problems.append("parameters_billions: above 0; guess it where the vendor does not say")
    if not remote.first_token_seconds > 0:
        problems.append("first_token_seconds: above 0")
    for name in (
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "saturated_decode_tokens_per_second",
    ):
        rate = getattr(remote, name)
        if rate is not None and not 0 < rate < 1e9:
            problems.append(f"{name}: above 0, not {rate}")
    return problems
