"""Scenario files: a cluster in TOML, checked as a whole.

`docs/simulator.md` has the format.
"""

import math
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from controller.domain.hardware import DeviceClass, ModelConfiguration, architecture
from controller.lab.simulator.cluster import ClusterDescription, NodeEvent, NodeGroup, PlacedModel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT: Final = "pointsman.scenario/1"
"""The value of `format`."""

SHIPPED: Final = ("drlm",)
"""Scenarios that come with the package, by name."""

_MOST_NODES: Final = 10_000
_GIB: Final = 1 << 30


class ScenarioError(ValueError):
    """The scenario cannot be read; the text lists everything that is wrong."""


def read_scenario(name_or_path: str | Path) -> ClusterDescription:
    """One of the `SHIPPED` scenarios by name, or a file.

    Raises:
        ScenarioError: there is no such scenario, or it says something impossible.
    """
    if str(name_or_path) in SHIPPED:
        shipped = resources.files("controller.lab.simulator") / "scenarios" / f"{name_or_path}.toml"
        return parse_scenario(shipped.read_text(encoding="utf-8"), str(name_or_path))
    path = Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScenarioError(
            f"{path}: cannot be read: {error.strerror}; name a TOML file or one of "
            f"{', '.join(SHIPPED)}"
        ) from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: not a text file") from error
    return parse_scenario(text, str(path))


def parse_scenario(text: str, label: str) -> ClusterDescription:
    """The cluster that a TOML text describes.

    Args:
        text: the file's.
        label: what errors call it.

    Raises:
        ScenarioError: it is not TOML, has unknown or impossible values, or places nothing.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{label}: not valid TOML: {error}") from error
    problems: list[str] = []
    root = _Table(label, tables, problems)
    if root.take("format", str, FORMAT) != FORMAT:
        problems.append(f"{label}: format is {tables['format']!r}; this version reads {FORMAT}")
    name = root.take("name", str, Path(label).stem)
    devices = [_device(table) for table in root.tables("device")]
    classes = [device.kind for device in devices]
    groups = [_group(table, classes) for table in root.tables("nodes")]
    models = [model for table in root.tables("model") for model in _models(table, classes)]
    for what, seen in (
        ("device class", classes),
        ("group of nodes", [group.name for group in groups]),
        ("model", [model.configuration.name for model in models]),
    ):
        problems.extend(
            f"{label}: {what} {twice} is there twice"
            for twice in sorted({each for each in seen if seen.count(each) > 1})
        )
    nodes = [f"{group.name}-{at}" for group in groups for at in range(group.count)]
    events = [_event(table, nodes) for table in root.tables("event")]
    root.finish()
    if not problems and len(nodes) > _MOST_NODES:
        problems.append(f"{label}: {len(nodes)} nodes; at most {_MOST_NODES}")
    if problems:
        raise ScenarioError("\n".join(problems))
    cluster = ClusterDescription(
        name,
        tuple(devices),
        tuple(groups),
        tuple(models),
        tuple(sorted(events, key=lambda event: event.at_seconds)),
    )
    bare = [group.name for k, group in enumerate(groups) if not cluster.hosted[:, k].any()]
    if not groups or not models or bare:
        which = ", ".join(bare) or "the cluster"
        raise ScenarioError(
            f"{label}: {which} has no model that is placed on its class and fits its memory"
        )
    return cluster


class _Table:
    """One TOML table; what is taken from it is checked, what is left is unknown."""

    def __init__(self, label: str, values: Mapping[str, Any], problems: list[str]) -> None:
        self.label, self.values, self.problems = label, values, problems
        self.left = set(values)

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        self.left.discard(key)
        if key not in self.values:
            if default is None:
                self.problems.append(f"{self.label}: lacks {key}")
                return kind()
            return default
        value = self.values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            self.problems.append(f"{self.label}: {key} is {value!r}, no {kind.__name__}")
            return kind() if default is None else default
        return value

    def number(
        self, key: str, kind: type, least: float, default: Any = None, above: bool = False
    ) -> Any:
        value = self.take(key, kind, default)
        fits = value > least if above else value >= least
        if key in self.values and not (fits and math.isfinite(value)):
            word = "above" if above else "at least"
            self.problems.append(f"{self.label}: {key} is {value}; {word} {least:g} and finite")
            return default if default is not None else kind(1)
        return value

    def choice(self, key: str, known: list[str]) -> int:
        value = self.take(key, str)
        return self.index(key, value, known) if value else 0

    def index(self, key: str, value: str, known: list[str]) -> int:
        if value not in known:
            self.problems.append(
                f"{self.label}: {key} names {value!r}; there are {', '.join(known) or 'none'}"
            )
            return 0
        return known.index(value)

    def list_of(self, key: str, kind: type) -> list[Any]:
        values = self.take(key, list)
        good = [each for each in values if isinstance(each, kind) and not isinstance(each, bool)]
        if len(good) < len(values) or not values:
            self.problems.append(f"{self.label}: {key} must list {kind.__name__}s, at least one")
        return good

    def tables(self, key: str) -> "list[_Table]":
        self.left.discard(key)
        found = self.values.get(key, [])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            self.problems.append(f"{self.label}: {key} must be written as [[{key}]]")
            return []
        return [
            _Table(f"{self.label}, [[{key}]] {number}", each, self.problems)
            for number, each in enumerate(found, 1)
        ]

    def finish(self) -> None:
        self.problems.extend(f"{self.label}: unknown key {key}" for key in sorted(self.left))


def _device(table: _Table) -> DeviceClass:
    device = DeviceClass(
        table.take("class", str) or "?",
        table.number("cores", int, 1, 1),
        int(table.number("memory_gib", float, 0.0, 1.0, above=True) * _GIB),
        table.number("accelerator_cores", int, 0, 0),
    )
    table.finish()
    return device


def _group(table: _Table, classes: list[str]) -> NodeGroup:
    group = NodeGroup(
        name=table.take("name", str),
        device=table.choice("class", classes),
        count=table.number("count", int, 1, 1),
        speed_ratio=table.number("speed_ratio", float, 0.0, 1.0, above=True),
        memory_gib=table.number("memory_gib", float, 0.0, 4.0, above=True),
        slots=table.number("slots", int, 1, 1),
        idle_watts=table.number("idle_watts", float, 0.0, 0.0),
        active_watts=table.number("active_watts", float, 0.0, 10.0, above=True),
        usd_per_hour=table.number("usd_per_hour", float, 0.0, 0.0),
    )
    if group.active_watts < group.idle_watts:
        table.problems.append(f"{table.label}: active_watts is below idle_watts")
    table.finish()
    return group


def _models(table: _Table, classes: list[str]) -> list[PlacedModel]:
    family = table.take("family", str) or "?"
    billions = table.number("billions", float, 0.0, above=True) or 1.0
    active = table.number("active_billions", float, 0.0, billions, above=True)
    levels = table.list_of("quantisation_bits", int)
    names = table.list_of("classes", str)
    devices = tuple(dict.fromkeys(table.index("classes", each, classes) for each in names))
    if active > billions:
        table.problems.append(f"{table.label}: active_billions is above billions")
    layers, heads = architecture(family, billions) or (None, None)
    table.finish()
    found = []
    for bits in levels:
        if 1 <= bits <= 32:
            configuration = ModelConfiguration(family, billions, bits, layers, heads)
            found.append(PlacedModel(configuration, active, devices))
        else:
            table.problems.append(f"{table.label}: quantisation_bits has {bits}; 1 to 32")
    return found


def _event(table: _Table, nodes: list[str]) -> NodeEvent:
    node = table.choice("node", nodes)
    at_seconds = table.number("at_seconds", float, 0.0, 0.0)
    what = table.take("what", str, "fails")
    if what not in ("fails", "joins"):
        table.problems.append(f"{table.label}: what is {what!r}; fails or joins")
    table.finish()
    return NodeEvent(node, at_seconds, what == "joins")
