"""Messages of pointsman.v1 to dataclasses and back: fields of one name are one fact.

A `Codec` compares the two types once, when a program starts, and raises for a field that only one
of them has. So a new fact is written down in the .proto file and in the dataclass, and nowhere
between. Both programs use this module; `proto/generate.py` puts it beside the generated stubs.

| in the dataclass | in the message |
| --- | --- |
| `float`, `int`, `str`, `bool`, `bytes`, a `NewType` of one | a field of that type |
| `X | None` | absent; "" or 0 where the field cannot be absent |
| `X = default` | an `optional` field; absent takes the default |
| an `Enum` | the enum value of the same name, or a string that is the enum's value |
| a `str` | the enum value's name in small letters, "none" for none |
| a dataclass | a message; its codec is the one given, or made on the spot |
| `tuple[X, ...]` | a repeated field |
"""

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

Value = TypeVar("Value")
Wire = TypeVar("Wire", bound=Message)

Check = Callable[[Any], Any]
_Convert = Callable[[Any], Any]
_MISSING = dataclasses.MISSING


class Codec(Generic[Value, Wire]):
    """Converts between one dataclass and one message.

    Args:
        value: the dataclass.
        wire: the message.
        nested: codecs of dataclasses that `value` contains, where a plain one would not do.
        renamed: field of the dataclass -> field of the message, where the names differ.
        read_with: field of the dataclass -> what it is, from the whole message.
        write_with: field of the message -> what it is, from the whole value.
        by_hand: fields of either that are not converted; callers pass them to `read` and `write`.
        unknown: for each enum, what a value that this program does not know is read as.
        checks: field -> called with what was read of it, unless it is absent; returns what is kept.

    Raises:
        TypeError: a field of one side has no counterpart on the other.
    """

    def __init__(
        self,
        value: type[Value],
        wire: type[Wire],
        *,
        nested: "Iterable[Codec[Any, Any]]" = (),
        renamed: Mapping[str, str] | None = None,
        read_with: Mapping[str, Callable[[Wire], Any]] | None = None,
        write_with: Mapping[str, Callable[[Value], Any]] | None = None,
        by_hand: Collection[str] = (),
        unknown: Iterable[enum.Enum] = (),
        checks: Mapping[str, Check] | None = None,
    ) -> None:
        self.value, self.wire = value, wire
        renamed, checks = renamed or {}, checks or {}
        read_with, write_with = read_with or {}, write_with or {}
        known = {codec.value: codec for codec in nested}
        unknowns = {type(member): member for member in unknown}
        hints = typing.get_type_hints(value)
        fields = {
            field.name: (field, renamed.get(field.name, field.name))
            for field in dataclasses.fields(value)  # type: ignore[arg-type]
            if field.name not in by_hand
        }
        descriptors: Mapping[str, Any] = wire.DESCRIPTOR.fields_by_name
        walked = {name for _, name in fields.values()}
        if missing := walked - {*descriptors} - {*read_with}:
            raise TypeError(f"{wire.DESCRIPTOR.name} lacks {sorted(missing)} of {value.__name__}")
        if missing := {*descriptors} - walked - {*write_with} - {*by_hand}:
            raise TypeError(f"{value.__name__} lacks {sorted(missing)} of {wire.DESCRIPTOR.name}")
        self.walked = frozenset({*walked, *write_with})
        """Fields of the message that are converted, not set by hand."""
        # Each function is one expression over all fields, as a hand would write it and as fast.
        names: dict[str, Any] = {"value": value, "wire": wire}
        names |= {f"read_all_{name}": read for name, read in read_with.items()}
        names |= {f"write_all_{name}": write for name, write in write_with.items()}
        reads = [f"{name}=read_all_{name}(message)" for name in read_with]
        writes = [f"{name}=write_all_{name}(given)" for name in write_with]
        for field, name in fields.values():
            if name not in descriptors:
                continue
            descriptor, hint = descriptors[name], _Hint.of(hints[field.name])
            if field.name in read_with and name in write_with:
                continue
            read, write = _conversion(descriptor, hint, known, unknowns)
            names |= {f"read_{name}": read, f"write_{name}": write}
            names |= {f"check_{name}": checks.get(field.name), f"default_{name}": _default(field)}
            found, kept = f"message.{name}", f"given.{field.name}"
            if read is not None:
                found = f"read_{name}({found})"
            if field.name in checks:
                found = f"check_{name}({found})"
            if descriptor.has_presence and (hint.is_optional or _default(field) is not None):
                found = f"{found} if message.HasField({name!r}) else default_{name}"
            if write is not None:
                is_none = f"None if {kept} is None else " if hint.is_optional else ""
                kept = f"{is_none}write_{name}({kept})"
            if field.name not in read_with:
                reads.append(f"{field.name}={found}")
            if name not in write_with:
                writes.append(f"{name}={kept}")
        self._read = eval(f"lambda message, by_hand: value({', '.join(reads)}, **by_hand)", names)
        self._write = eval(f"lambda given, by_hand: wire({', '.join(writes)}, **by_hand)", names)

    def read(self, message: Wire, /, **by_hand: Any) -> Value:
        """The value that a message stands for, completed with the fields that are set by hand."""
        return self._read(message, by_hand)  # type: ignore[no-any-return]

    def write(self, value: Value, /, **by_hand: Any) -> Wire:
        """The message that stands for a value, completed with the fields that are set by hand."""
        return self._write(value, by_hand)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, slots=True)
class _Hint:
    """A field's annotation, taken apart; `type` is that of the items for a tuple."""

    type: Any
    is_optional: bool
    is_tuple: bool

    @classmethod
    def of(cls, annotation: Any) -> "_Hint":
        is_optional = is_tuple = False
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            (annotation,) = (a for a in typing.get_args(annotation) if a is not type(None))
            is_optional = True
        if typing.get_origin(annotation) is tuple:
            annotation, is_tuple = typing.get_args(annotation)[0], True
        return cls(getattr(annotation, "__supertype__", annotation), is_optional, is_tuple)


def enum_to_wire(kind: type[enum.Enum], wire: EnumDescriptor) -> dict[Any, Any]:
    """The number of each member's value on the wire.

    Raises:
        TypeError: a member has none, or a value of the wire has no member.
    """
    names = _small_names(wire)
    numbers = {name: number for number, name in names.items() if name != "unspecified"}
    members = {member.name.lower(): member for member in kind}
    if differing := members.keys() ^ numbers.keys():
        raise TypeError(f"{kind.__qualname__} and {wire.name}: only one has {sorted(differing)}")
    return {member: numbers[name] for name, member in members.items()}


def _small_names(wire: EnumDescriptor) -> dict[int, str]:
    """Number -> name without the enum's own, in small letters."""
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", wire.name).upper() + "_"
    return {value.number: value.name.removeprefix(prefix).lower() for value in wire.values}


def _default(field: "dataclasses.Field[Any]") -> Any:
    """What the field is when nobody says; None also when somebody has to."""
    if field.default is not _MISSING:
        return field.default
    return None if field.default_factory is _MISSING else field.default_factory()


def _conversion(
    descriptor: FieldDescriptor,
    hint: _Hint,
    known: "Mapping[Any, Codec[Any, Any]]",
    unknowns: Mapping[type[enum.Enum], enum.Enum],
) -> tuple[_Convert | None, _Convert | None]:
    """How a field is read and written; None for as it is."""
    read, write = _item_conversion(descriptor, hint.type, known, unknowns)
    if hint.is_tuple:
        return _each(read), _each(write)
    if hint.is_optional and not descriptor.has_presence and descriptor.enum_type is None:
        empty_is_none = read or (lambda found: found)
        return (lambda found: empty_is_none(found) if found else None), write
    return read, write


def _each(convert: _Convert | None) -> _Convert:
    if convert is None:
        return tuple
    return lambda found: tuple([convert(item) for item in found])


def _item_conversion(
    descriptor: FieldDescriptor,
    kind: Any,
    known: "Mapping[Any, Codec[Any, Any]]",
    unknowns: Mapping[type[enum.Enum], enum.Enum],
) -> tuple[_Convert | None, _Convert | None]:
    if descriptor.enum_type is not None:
        return _enum_conversion(descriptor.enum_type, kind, unknowns)
    if descriptor.message_type is not None:
        codec = known.get(kind) or Codec(
            kind, GetMessageClass(descriptor.message_type), nested=known.values()
        )
        return codec.read, codec.write
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind, attrgetter("value")
    return None, None


def _enum_conversion(
    wire: EnumDescriptor, kind: Any, unknowns: Mapping[type[enum.Enum], enum.Enum]
) -> tuple[_Convert, _Convert]:
    if kind is str:
        names = {
            number: "none" if name == "unspecified" else name
            for number, name in _small_names(wire).items()
        }
        numbers = {name: number for number, name in names.items()}
        return (lambda number: names.get(number, "none")), numbers.__getitem__
    numbers_of = enum_to_wire(kind, wire)
    members = {number: member for member, number in numbers_of.items()}
    unknown = unknowns.get(kind)
    return (lambda number: members.get(number, unknown)), numbers_of.__getitem__
