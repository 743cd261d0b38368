"""A settings file's tables as frozen dataclasses, with everything that is wrong in one list.

Both programs read their settings by it.
"""

import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
Number = TypeVar("Number", int, float)

REQUIRED: Final = MappingProxyType({"is_required": True})
"""Metadata of a field that a table must give; it has a default or is text."""


def read_toml(path: Path | None) -> dict[str, Any]:
    """The file's tables; none without a path.

    Raises:
        ValueError: it cannot be read or is not TOML; the text names the file.
    """
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error


def put(table: dict[str, Any], key: str, value: object) -> None:
    """Set a value by its dotted key, in the section that the key names."""
    section, _, leaf = key.rpartition(".")
    target = table.setdefault(section, {}) if section else table
    if isinstance(target, dict):  # `TableReader.build` reports a section that is not a table
        target[leaf] = value


class TableReader:
    """Builds settings from tables and collects what is wrong with them.

    What cannot be read has its default in what is built, so it is reported once.

    Args:
        splits_texts: a list may be given as one text with commas.

    Attributes:
        problems: everything wrong so far, one line each.
    """

    def __init__(self, *, splits_texts: bool) -> None:
        self._splits_texts = splits_texts
        self.problems: list[str] = []

    def put_variables(
        self, table: dict[str, Any], environ: Mapping[str, str], prefix: str, cls: type[Any]
    ) -> None:
        """Set what environment variables give: prefix, section if any, key, in capitals."""
        hints = get_type_hints(cls)
        sections = [key for key, kind in hints.items() if dataclasses.is_dataclass(kind)]
        lists = [key for key, kind in hints.items() if _dataclass_of_list(kind)]
        for name, value in environ.items():
            if not name.startswith(prefix):
                continue
            key = name.removeprefix(prefix).lower()
            if key in lists:
                self.problems.append(f"{name}: {key} are listed in the settings file")
                continue
            for section in sections:
                if key.startswith(f"{section}_"):
                    key = f"{section}.{key.removeprefix(f'{section}_')}"
                    break
            put(table, key, value)

    def build(self, cls: type[T], table: object, where: str = "") -> T:
        """The dataclass that a table describes.

        Args:
            cls: fields may be texts, numbers, flags, paths, lists of texts or numbers, another
                dataclass, a list of dataclasses, or one of these or None.
            table: a mapping, or what is built already.
            where: the table's dotted name; empty for the whole file.
        """
        if isinstance(table, cls):
            return table
        hints = get_type_hints(cls)
        required = [
            entry.name
            for entry in dataclasses.fields(cls)  # type: ignore[arg-type]  # a dataclass
            if entry.metadata.get("is_required")
        ]
        values: dict[str, Any] = {key: "" for key in required if hints[key] is str}
        if not isinstance(table, Mapping):
            self.problems.append(f"{where}: must be a table")
            return cls(**values)
        for key, value in table.items():
            label = f"{where}.{key}" if where else str(key)
            if key not in hints:
                what = f"{label}: no such setting"
                if isinstance(value, Mapping) and not where:
                    what = f"[{key}]: no such section"
                self.problems.append(what + _nearest(str(key), hints))
                continue
            try:
                values[key] = self._value(hints[key], value, label)
            except ValueError as error:
                self.problems.append(f"{label}: {error}")
        missing = [key for key in required if not table.get(key)]
        self.problems += [f"{where}: {key} is missing" for key in missing]
        return cls(**values)

    def _value(self, kind: Any, value: object, label: str) -> object:
        if NoneType in get_args(kind):
            if value is None:
                return None
            kind = get_args(kind)[0]
        if dataclasses.is_dataclass(kind):
            return self.build(kind, value, label)  # type: ignore[arg-type]  # a class
        entry_class = _dataclass_of_list(kind)
        if entry_class is not None:
            entries = value if isinstance(value, list | tuple) else [value]
            return tuple(
                self.build(entry_class, entry, f"{label}[{index}]")
                for index, entry in enumerate(entries)
            )
        if get_origin(kind) is tuple:
            if self._splits_texts and isinstance(value, str):
                value = [part.strip() for part in value.split(",")]
            return _list(get_args(kind)[0], value)
        return _single(kind, value)


def _dataclass_of_list(kind: Any) -> type[Any] | None:
    entry = get_args(kind)[0] if get_origin(kind) is tuple else None
    return entry if dataclasses.is_dataclass(entry) else None  # type: ignore[return-value]


def _single(kind: object, value: object) -> object:
    if kind is bool:
        text = str(value).lower()
        if text in ("true", "1", "yes"):
            return True
        if text in ("false", "0", "no"):
            return False
        raise ValueError(f"must be true or false, not {value!r}")
    if isinstance(value, bool):
        raise ValueError(f"must not be {value!r}")
    if kind is int:
        return _number(int, value, "a whole number")
    if kind is float:
        return _number(float, value, "a number")
    if kind is Path:
        return Path(str(value))
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {value!r}")
    return value


def _list(kind: object, value: object) -> tuple[object, ...]:
    what = "a list of numbers" if kind is float else "a list of texts"
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be {what}, not {value!r}")
    if kind is float:
        return tuple(_number(float, item, what) for item in value)
    if not all(isinstance(item, str) for item in value):
        raise ValueError(f"must be {what}, not {value!r}")
    return tuple(value)


def _number(kind: Callable[[str], Number], value: object, what: str) -> Number:
    try:
        return kind(str(value))
    except ValueError:
        raise ValueError(f"must be {what}, not {value!r}") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
