"""The agent's settings: one TOML file, overridden by environment, overridden by flags."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from edge_agent.engine.base import PrefixReuse
from edge_agent.engine.registry import ModelSettings as ModelSettings  # a part of the settings
from edge_agent.engine.registry import spec_of
from edge_agent.errors import UsageError
from edge_agent.limits import limit_problems
from pointsman.settings_table import TableReader, put, read_toml

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


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
class LinkSettings:
    """The node's link to the controller, when its traffic costs money or is capped.

    Attributes:
        is_metered: Send nothing only to measure the link. Always so if the link has a price.
        receive_usd_per_gigabyte: Price of received data (prompts), counted by routing.
        transmit_usd_per_gigabyte: Price of transmitted data (answers), counted by routing.
    """

    is_metered: bool = False
    receive_usd_per_gigabyte: float = 0.0
    transmit_usd_per_gigabyte: float = 0.0


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
        link: what traffic to the controller costs.
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
    link: LinkSettings = field(default_factory=LinkSettings)
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
    link = settings.link
    problems += [
        f"link.{name}: 0 or more, not {getattr(link, name)}"
        for name in ("receive_usd_per_gigabyte", "transmit_usd_per_gigabyte")
        if not 0 <= getattr(link, name) < 1e9
    ]
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
        reuses = [reuse.value for reuse in PrefixReuse]
        if model.prefix_reuse not in reuses:
            problems.append(f"models {model.name}: prefix_reuse is one of {', '.join(reuses)}")
        if not 0 < model.cpu_share_ratio <= 1:
            problems.append(f"models {model.name}: cpu_share_ratio above 0, at most 1")
        prices = (model.prompt_usd_per_token, model.completion_usd_per_token, model.request_usd)
        if not all(0 <= price < 1e6 for price in prices):
            problems.append(f"models {model.name}: prices are 0 or more")
        problems += [f"models {model.name}: {problem}" for problem in spec_of(model).problems()]
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
