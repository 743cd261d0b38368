"""What the model catalogue says: which models there are, what they are and where to get them.

`load_catalog` reads the YAML and hands out frozen values. Everything wrong with it is reported at
once. The file's format is described in its own head, `models/catalog.yaml`.
"""

import difflib
import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from edge_agent.errors import CatalogError, UnknownModelError

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
_FAMILY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TUNING: Final = re.compile(r"instruct|base")
_QUANTISATION: Final = re.compile(r"[A-Z][A-Z0-9_]*")
_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.gguf")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
# None of these may begin with "-": they become arguments of the installer.
_PACKAGE: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*")
_INNER_PATH: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*(?:/[A-Za-z0-9_][A-Za-z0-9._+-]*)*")
_URL: Final = re.compile(r"https?://[^\s/]+/\S*")
_LICENCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a hub repository, at a pinned revision."""

    repository: str
    file: str
    revision: str

    def describe(self) -> str:
        """Return what people are told this source is."""
        return f"hub {self.repository}@{self.revision[:12]}"


@dataclass(frozen=True, slots=True)
class PackagePart:
    """One file inside one wheel; `path` is relative to the wheel's root."""

    package: str
    version: str
    path: str

    def describe(self) -> str:
        """Return the requirement that names the wheel."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class PackageSource:
    """Python packages that carry the file, whole or in parts joined in this order."""

    parts: tuple[PackagePart, ...]

    def describe(self) -> str:
        """Return what people are told this source is."""
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"package {self.parts[0].describe()}{more}"


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A file at an http or https address."""

    url: str

    def describe(self) -> str:
        """Return what people are told this source is, without user, password or query."""
        scheme, _, rest = self.url.partition("://")
        host, _, path = rest.partition("/")
        return f"url {scheme}://{host.rpartition('@')[2]}/{re.split('[?#]', path)[0]}"


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A file on this machine; `~` and environment variables in `path` are still unexpanded."""

    path: str

    def describe(self) -> str:
        """Return what people are told this source is."""
        return f"local {self.path}"


Source = HubSource | PackageSource | UrlSource | LocalSource


class TemplateKind(enum.Enum):
    """Where a model's chat template comes from."""

    FROM_FILE = "from-file"
    RAW = "raw"
    OVERRIDE = "override"


@dataclass(frozen=True, slots=True)
class Template:
    """How a chat becomes a prompt; `jinja` is set exactly when `kind` is OVERRIDE."""

    kind: TemplateKind
    jinja: str | None = None

    @property
    def accepts_chats(self) -> bool:
        """Whether the model can be given a chat, as far as the catalogue knows."""
        return self.kind is not TemplateKind.RAW


@dataclass(frozen=True, slots=True)
class Licence:
    """The terms of a model: an SPDX identifier, or a name with the address of its text."""

    name: str
    url: str | None = None


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model that can be pulled.

    Attributes:
        size_bytes, sha256: of the file; None for a derived entry, whose digest is only known once
            its file has been made.
        sources: in the order they are tried; empty for a derived entry.
        derive_from: the name of the entry that the quantiser makes this one from; None otherwise.
        summary: one sentence for people, or empty.
        is_base_model: trained to continue text, not tuned to follow instructions.
    """

    name: str
    family: str
    parameters_billions: float
    quantisation: str
    context_tokens: int
    template: Template
    licence: Licence
    file: str
    size_bytes: int | None
    sha256: str | None
    sources: tuple[Source, ...]
    derive_from: str | None = None
    summary: str = ""
    is_base_model: bool = False


@dataclass(frozen=True, slots=True)
class Catalog:
    """All entries by name, in the order of the file."""

    entries: Mapping[str, CatalogEntry] = field(default_factory=lambda: MappingProxyType({}))

    def get(self, name: str) -> CatalogEntry:
        """Return the entry of this name.

        Raises:
            UnknownModelError: there is none; the text offers the nearest names.
        """
        entry = self.entries.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, self.entries, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UnknownModelError(
                f"The catalogue has no model named {name!r}.{hint}"
                " `edge-agent models list` shows all."
            )
        return entry

    def base_of(self, entry: CatalogEntry) -> CatalogEntry | None:
        """Return the entry that a derived one is made from; None when it is not derived."""
        return None if entry.derive_from is None else self.entries[entry.derive_from]


def packaged_catalog_path() -> Path:
    """Return the catalogue that came with this installation, or that of the checkout.

    Raises:
        CatalogError: neither is there.
    """
    beside = Path(__file__).with_name("catalog.yaml")
    checkout = Path(__file__).parents[2] / "models" / "catalog.yaml"
    for path in (beside, checkout):
        if path.is_file():
            return path
    raise CatalogError(f"The model catalogue {beside} is missing; install the agent again.")


def load_catalog(path: Path | None = None, user_path: Path | None = None) -> Catalog:
    """Read the catalogue.

    Args:
        path: the catalogue; None takes the one that came with the agent.
        user_path: a second file whose entries and templates add to it, or replace those of the
            same name.

    Raises:
        CatalogError: a file cannot be read or is wrong; the text lists everything that is.
    """
    problems: list[str] = []
    raw_entries: dict[str, _Fields] = {}
    templates: dict[str, str] = {}
    for file in (path or packaged_catalog_path(), user_path):
        if file is None:
            continue
        document = _Fields(str(file), _read_yaml(file, problems), problems)
        document.allow("models", "templates")
        templates.update(_read_templates(document))
        own: dict[str, _Fields] = {}
        for index, item in enumerate(document.items("models")):
            where = f"{file}: models[{index}]"
            name = item.get("name") if isinstance(item, dict) else None
            if isinstance(name, str):
                where += f" ({name})"
            fields = _Fields(where, item, problems)
            name = fields.text("name", _NAME, "lower-case letters, digits, '.', '_' and '-'")
            if name in own:
                fields.complain(f"the name {name} is used twice")
            own[name] = fields
        raw_entries.update(own)
    entries = _build_entries(raw_entries, templates)
    _check_files(entries.values(), problems)
    if problems:
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CatalogError(f"The model catalogue has {count}:\n{listed}")
    return Catalog(MappingProxyType(entries))


class _Fields:
    """One mapping of the catalogue under inspection.

    A wrong field is noted in `problems` and read as a harmless value, so that reading goes on and
    finds the other problems; the caller gives up in the end when any was noted.
    """

    def __init__(self, where: str, value: object, problems: list[str]) -> None:
        self._where = where
        self._problems = problems
        self.values: dict[str, Any] = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            self.complain(f"must be a mapping, not {_kind(value)}")

    def complain(self, problem: str) -> None:
        """Note one problem of this mapping."""
        self._problems.append(f"{self._where}: {problem}")

    def has(self, key: str) -> bool:
        """Return whether the key is there with a value."""
        return self.values.get(key) is not None

    def allow(self, *keys: str) -> None:
        """Note every key that is not one of these, with the nearest that is."""
        for key in self.values:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(keys)}"
                self.complain(f"unknown key {key!r}; {hint}")

    def forbid(self, keys: Iterable[str], reason: str) -> None:
        """Note each of these keys that is there."""
        for key in keys:
            if key in self.values:
                self.complain(f"{key} does not belong here: {reason}")

    def text(self, key: str, pattern: re.Pattern[str] | None = None, form: str = "") -> str:
        """Return a text that matches the whole pattern; `form` says the pattern in words."""
        value = self.values.get(key)
        if value is None:
            self.complain(f"{key} is missing")
        elif not isinstance(value, str):
            self.complain(f"{key} must be a text, not {_kind(value)}; put it in quotes")
        elif pattern is not None and not pattern.fullmatch(value):
            self.complain(f"{key} {value!r} must be {form}")
        else:
            return value
        return ""

    def positive(self, key: str) -> float:
        """Return a number above zero."""
        value = self.values.get(key)
        if value is None:
            self.complain(f"{key} is missing")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            self.complain(f"{key} must be a number, not {_kind(value)}")
        elif not 0 < value < float("inf"):
            self.complain(f"{key} must be above 0, not {value}")
        else:
            return value
        return 1

    def count(self, key: str) -> int:
        """Return a whole number above zero."""
        value = self.positive(key)
        if not isinstance(value, int):
            self.complain(f"{key} must be a whole number, not {value}")
            return 1
        return value

    def items(self, key: str) -> list[Any]:
        """Return a list; an absent one is empty."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            self.complain(f"{key} must be a list, not {_kind(value)}")
            return []
        return value

    def silent(self) -> "_Fields":
        """Return the same mapping for a second reading whose problems are noted already."""
        return _Fields(self._where, self.values, [])

    def inside(self, key: str, value: object) -> "_Fields":
        """Return the mapping found under `key`, for inspection."""
        return _Fields(f"{self._where}: {key}", value, self._problems)


def _kind(value: object) -> str:
    names = {
        dict: "a mapping",
        list: "a list",
        str: "a text",
        bool: "yes or no",
        type(None): "empty",
    }
    return names.get(type(value), f"the {type(value).__name__} {value}")


def _read_yaml(path: Path, problems: list[str]) -> object:
    import yaml  # costs 20 ms that `edge-agent status` need not pay

    class Loader(yaml.SafeLoader):
        """Refuses a key given twice, which PyYAML would let the second one win in silence."""

    def construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:  # before merge keys bring in what may be overridden
            key = str(loader.construct_object(key_node, deep=True))
            if key in seen:
                line = key_node.start_mark.line + 1
                problems.append(f"{path}: line {line}: the key {key!r} is given twice")
            seen.add(key)
        loader.flatten_mapping(node)
        return {
            str(loader.construct_object(key, deep=True)): loader.construct_object(value, deep=True)
            for key, value in node.value
        }

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct_mapping)
    try:
        with path.open(encoding="utf-8") as file:
            # The loader is SafeLoader with one stricter constructor: it makes plain values only.
            document = yaml.load(file, Loader)
    except OSError as error:
        raise CatalogError(
            f"Cannot read the model catalogue {path}: {error.strerror}. Check its path."
        ) from error
    except UnicodeDecodeError as error:
        raise CatalogError(f"The model catalogue {path} is not UTF-8: {error.reason}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split()) or "nested too deep"
        raise CatalogError(f"The model catalogue {path} is not valid YAML: {said}") from error
    return {} if document is None else document


def _read_templates(document: _Fields) -> dict[str, str]:
    if not document.has("templates"):
        return {}
    fields = document.inside("templates", document.values["templates"])
    for reserved in (TemplateKind.FROM_FILE.value, TemplateKind.RAW.value):
        fields.forbid([reserved], "the name is taken by the format itself")
    return {name: fields.text(name) for name in fields.values}


_DESCRIPTIVE: Final = (
    "family",
    "parameters_billions",
    "context_tokens",
    "template",
    "tuning",
    "licence",
)
_OF_A_FILE: Final = ("size_bytes", "sha256", "sources")
_ALL_KEYS: Final = (
    "name",
    "summary",
    *_DESCRIPTIVE,
    "quantisation",
    "file",
    *_OF_A_FILE,
    "derive_from",
)


def _build_entries(
    raw_entries: Mapping[str, _Fields], templates: Mapping[str, str]
) -> dict[str, CatalogEntry]:
    built: dict[str, CatalogEntry] = {}
    for name, fields in raw_entries.items():
        fields.allow(*_ALL_KEYS)
        if "derive_from" not in fields.values:
            built[name] = _read_entry(name, fields, fields, templates)
    for name, fields in raw_entries.items():
        if "derive_from" not in fields.values:
            continue
        fields.forbid(
            _OF_A_FILE, "the quantiser makes a derived entry, and its output may differ by build"
        )
        base_name = fields.text("derive_from")
        base = raw_entries.get(base_name)
        if base is None:
            if base_name:
                near = difflib.get_close_matches(base_name, raw_entries, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                fields.complain(f"derive_from names no entry: {base_name!r}{hint}")
            continue
        if "derive_from" in base.values:
            fields.complain(
                f"derive_from names {base_name}, which is derived itself; every quantising loses"
                " accuracy, so derive from the entry that has sources"
            )
            continue
        built[name] = _read_entry(name, fields, base.silent(), templates)
    return {name: built[name] for name in raw_entries if name in built}


def _read_entry(
    name: str, fields: _Fields, base: _Fields, templates: Mapping[str, str]
) -> CatalogEntry:
    """Read one entry; what a derived one leaves out comes from `base` (itself when not derived)."""
    is_derived = base is not fields
    given = {key: fields if not is_derived or fields.has(key) else base for key in _DESCRIPTIVE}
    return CatalogEntry(
        name=name,
        family=given["family"].text("family", _FAMILY, "letters, digits, '.', '_' and '-'"),
        parameters_billions=float(given["parameters_billions"].positive("parameters_billions")),
        quantisation=fields.text(
            "quantisation", _QUANTISATION, "a llama.cpp name in capitals, such as Q4_K_M"
        ),
        context_tokens=given["context_tokens"].count("context_tokens"),
        template=_read_template(given["template"], templates),
        licence=_read_licence(given["licence"]),
        file=fields.text("file", _FILE, "a plain file name that ends in .gguf"),
        size_bytes=None if is_derived else fields.count("size_bytes"),
        sha256=None if is_derived else _read_sha256(fields),
        sources=() if is_derived else _read_sources(fields),
        derive_from=base.values.get("name") if is_derived else None,
        is_base_model=_read_tuning(given["tuning"]),
        summary=fields.text("summary") if fields.has("summary") else "",
    )


def _read_tuning(fields: _Fields) -> bool:
    """Whether it is a base model; an entry that says nothing is tuned."""
    if not fields.has("tuning"):
        return False
    return fields.text("tuning", _TUNING, "instruct or base") == "base"


def _read_sha256(fields: _Fields) -> str:
    form = "64 hexadecimal digits, as `sha256sum FILE` prints them"
    return fields.text("sha256", _SHA256, form).lower()


def _read_template(fields: _Fields, templates: Mapping[str, str]) -> Template:
    choice = fields.text("template")
    if choice == TemplateKind.FROM_FILE.value:
        return Template(TemplateKind.FROM_FILE)
    if choice == TemplateKind.RAW.value or not choice:
        return Template(TemplateKind.RAW)
    if choice not in templates:
        known = ", ".join(["from-file", "raw", *templates])
        fields.complain(f"template {choice!r} is none of {known}")
        return Template(TemplateKind.RAW)
    return Template(TemplateKind.OVERRIDE, templates[choice])


def _read_licence(fields: _Fields) -> Licence:
    value = fields.values.get("licence")
    if not isinstance(value, dict):
        form = "an SPDX identifier such as Apache-2.0, or a mapping with name and url"
        return Licence(fields.text("licence", _LICENCE, form))
    inner = fields.inside("licence", value)
    inner.allow("name", "url")
    return Licence(inner.text("name"), inner.text("url", _URL, "an http or https address"))


def _read_sources(fields: _Fields) -> tuple[Source, ...]:
    items = fields.items("sources")
    if not items:
        fields.complain("sources is missing: list where the file comes from, best first")
    return tuple(
        source
        for index, item in enumerate(items)
        if (source := _read_source(fields.inside(f"sources[{index}]", item))) is not None
    )


def _read_source(fields: _Fields) -> Source | None:
    fields.allow("hub", "package", "url", "local")
    if len(fields.values) != 1:
        if not fields.values.keys() - {"hub", "package", "url", "local"}:
            fields.complain("must have exactly one of hub, package, url, local")
        return None
    if "hub" in fields.values:
        hub = fields.inside("hub", fields.values["hub"])
        hub.allow("repository", "file", "revision")
        return HubSource(
            hub.text("repository", _REPOSITORY, "OWNER/NAME"),
            hub.text("file", _INNER_PATH, "a relative path"),
            hub.text("revision", _REVISION, "a commit, tag or branch"),
        )
    if "package" in fields.values:
        package = fields.inside("package", fields.values["package"])
        if "parts" not in package.values:
            return PackageSource((_read_part(package),))
        package.allow("parts")
        parts = [
            _read_part(package.inside(f"parts[{index}]", item))
            for index, item in enumerate(package.items("parts"))
        ]
        if not parts:
            package.complain("parts is empty")
        return PackageSource(tuple(parts))
    if "url" in fields.values:
        return UrlSource(fields.text("url", _URL, "an http or https address"))
    if "local" in fields.values:
        return LocalSource(fields.text("local"))
    return None


def _read_part(fields: _Fields) -> PackagePart:
    fields.allow("package", "version", "path")
    return PackagePart(
        fields.text("package", _PACKAGE, "the name of a Python package"),
        fields.text("version", _VERSION, "an exact version"),
        fields.text("path", _INNER_PATH, "a path relative to the wheel's root"),
    )


def _check_files(entries: Iterable[CatalogEntry], problems: list[str]) -> None:
    """Note entries that would overwrite each other's file."""
    owner: dict[str, CatalogEntry] = {}
    for entry in entries:
        if not entry.file:
            continue
        first = owner.setdefault(entry.file.lower(), entry)  # some file systems ignore case
        if first is not entry:
            problems.append(f"{first.name} and {entry.name} both want the file {entry.file}")
