"""What orders have made of this node's models, kept over restarts."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog

from edge_agent.config import ModelSettings
from edge_agent.engine.registry import ENGINES, SpecOf
from edge_agent.serving.hosted import HostedModel, new_hosted
from edge_agent.serving.lifecycle import ModelLife

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KeptOrder:
    """What the last orders about one model came to.

    Attributes:
        is_wanted: loaded when the agent starts.
        is_pinned: never unloaded to make room or for being idle.
        slots, context_tokens: what it was loaded with.
        settings_digest: of the model's entry in the settings at that time, "" without one. An entry
            that was edited since is the later word.
    """

    is_wanted: bool
    is_pinned: bool
    slots: int
    context_tokens: int
    settings_digest: str


def order_of(
    model: HostedModel, is_wanted: bool, in_settings: ModelSettings | None
) -> KeptOrder | None:
    """What is to be kept of a model after an order; None when the settings say the same."""
    kept = KeptOrder(
        is_wanted,
        model.is_pinned,
        model.settings.slots,
        model.settings.context_tokens,
        "" if in_settings is None else _digest(in_settings),
    )
    if in_settings is None:
        return kept if is_wanted or model.is_pinned else None
    alike = (
        in_settings.load_at_start,
        in_settings.is_pinned,
        in_settings.slots,
        in_settings.context_tokens,
    )
    same = alike == (kept.is_wanted, kept.is_pinned, kept.slots, kept.context_tokens)
    return None if same else kept


def models_at_start(
    settings: Iterable[ModelSettings],
    kept: Mapping[str, KeptOrder],
    engines: Sequence[SpecOf] = ENGINES,
) -> dict[str, HostedModel]:
    """The node's models by name: those of the settings as orders left them, then ordered ones."""
    models = {entry.name: _restored(entry, kept.get(entry.name), engines) for entry in settings}
    for name, order in kept.items():
        if name not in models and not order.settings_digest:
            models[name] = _ordered(ModelSettings(name, load_at_start=False), order, engines)
    return models


def _restored(
    entry: ModelSettings, order: KeptOrder | None, engines: Sequence[SpecOf]
) -> HostedModel:
    if order is None or order.settings_digest != _digest(entry):
        return new_hosted(entry, engines)
    return _ordered(entry, order, engines)


def _ordered(entry: ModelSettings, order: KeptOrder, engines: Sequence[SpecOf]) -> HostedModel:
    settings = replace(entry, slots=order.slots, context_tokens=order.context_tokens)
    return HostedModel(ModelLife(settings, order.is_wanted, order.is_pinned), engines)


def _digest(entry: ModelSettings) -> str:
    text = json.dumps(asdict(entry), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class KeptOrders:
    """The file of orders, by model. A damaged one is as good as none: the settings hold then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._orders = _read(path)

    @property
    def orders(self) -> Mapping[str, KeptOrder]:
        """By the model's name, the oldest first."""
        return self._orders

    def put(self, changes: Mapping[str, KeptOrder | None]) -> None:
        """Keep these from now on; None forgets what was kept of a model.

        A disk that cannot be written loses them at the next restart only.
        """
        orders = {name: order for name, order in self._orders.items() if name not in changes}
        orders |= {name: order for name, order in changes.items() if order is not None}
        if orders == self._orders:
            return
        self._orders = orders
        partial = self._path.with_suffix(".partial")
        text = json.dumps({name: asdict(order) for name, order in orders.items()}, indent=1)
        try:
            partial.write_text(text)
            partial.replace(self._path)
        except OSError as error:
            log.warning("orders.not_kept", path=str(self._path), error=error.strerror)


def _read(path: Path) -> dict[str, KeptOrder]:
    try:
        found = json.loads(path.read_text())
        return {str(name): _checked(KeptOrder(**values)) for name, values in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("orders.not_read", path=str(path), error=f"{type(error).__name__}: {error}")
        return {}


def _checked(order: KeptOrder) -> KeptOrder:
    if not (isinstance(order.slots, int) and isinstance(order.context_tokens, int)):
        raise ValueError("slots and context_tokens are whole numbers")
    return order
