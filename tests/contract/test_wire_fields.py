"""Every field of the wire is set by one side and read by the other, or is there for people."""

import ast
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from pointsman.codec import Codec
from pointsman.v1 import admin_pb2, fleet_pb2, router_pb2, types_pb2

ROOT = Path(__file__).parents[2]
FILES = (router_pb2, fleet_pb2, admin_pb2, types_pb2)

CONVERTERS = ("controller.fleet.convert", "controller.api.convert", "edge_agent.link.convert")

DISPLAY_ONLY = frozenset(
    {
        # For people who look at the stream; no program goes by them.
        "Welcome.protocol_version",
        "Welcome.lease_seconds",
        # Its size is what counts: the bytes are there to be carried.
        "Probe.padding",
    }
)
"""Fields that one side sets and no program reads."""


def reachable(root: Descriptor) -> Iterator[Descriptor]:
    """A message and every one that its fields hold."""
    seen, left = set(), [root]
    while left:
        message = left.pop()
        if message.full_name in seen or not message.full_name.startswith("pointsman."):
            continue
        seen.add(message.full_name)
        yield message
        left += [field.message_type for field in message.fields if field.message_type]


def words(package: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names that the package's code sets (keyword arguments, assignments) and reads."""
    sets, reads = set(), set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg:
                sets.add(node.arg)
            elif isinstance(node, ast.Attribute):
                (reads if isinstance(node.ctx, ast.Load) else sets).add(node.attr)
                reads.add(node.attr)
                if isinstance(node.ctx, ast.Load):
                    sets.add(node.attr)  # of a message: x.field.CopyFrom(...), x.fields.append(...)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                reads.add(node.value)
                sets.add(node.value)
    return frozenset(sets), frozenset(reads)


def converted(package: str) -> frozenset[str]:
    """`Message.field` of every field that a codec of the package, or one of both, walks.

    And `Message` of each: a field that holds such a message may be found by its type.
    """
    for name in CONVERTERS:
        importlib.import_module(name)
    found = set()
    for codec in gc.get_objects():
        # Not isinstance, which would ask objects of other libraries for their class.
        if type(codec) is Codec and codec.value.__module__.startswith((package, "pointsman")):
            found |= {f"{codec.wire.DESCRIPTOR.name}.{name}" for name in codec.walked}
            found.add(codec.wire.DESCRIPTOR.name)
    return frozenset(found)


def unused(fields: Iterator[FieldDescriptor], setter: str, reader: str) -> list[str]:
    sets, reads = words(setter)[0], words(reader)[1]
    set_by_codec, read_by_codec = converted(setter), converted(reader)
    found = []
    for field in fields:
        name = f"{field.containing_type.name}.{field.name}"
        if field.message_type and field.message_type.name in set_by_codec & read_by_codec:
            continue
        if field.name not in sets and name not in set_by_codec:
            found.append(f"{name} is never set by {setter}")
        if field.name not in reads and name not in read_by_codec and name not in DISPLAY_ONLY:
            found.append(f"{name} is never read by {reader}")
    return found


@pytest.mark.parametrize(
    ("root", "setter", "reader"),
    [
        (fleet_pb2.ConnectRequest, "edge_agent", "controller"),
        (fleet_pb2.ConnectResponse, "controller", "edge_agent"),
    ],
)
def test_every_field_between_agent_and_controller_is_set_and_read(root, setter, reader) -> None:
    fields = (field for message in reachable(root.DESCRIPTOR) for field in message.fields)
    assert unused(fields, setter, reader) == []


def test_every_field_that_clients_and_operators_see_is_used_by_the_controller() -> None:
    sets, reads = words("controller")
    known = sets | reads
    by_codec = converted("controller")
    of_agents = {
        message.full_name
        for root in (fleet_pb2.ConnectRequest, fleet_pb2.ConnectResponse)
        for message in reachable(root.DESCRIPTOR)
    }
    assert [
        f"{message.name}.{field.name}"
        for file in FILES
        for message in file.DESCRIPTOR.message_types_by_name.values()
        if message.full_name not in of_agents
        for field in message.fields
        if field.name not in known and f"{message.name}.{field.name}" not in by_codec
    ] == []


def test_the_list_of_fields_for_people_names_fields_that_exist() -> None:
    messages = {
        name: message
        for file in FILES
        for name, message in file.DESCRIPTOR.message_types_by_name.items()
    }
    for entry in DISPLAY_ONLY:
        message, _, field = entry.partition(".")
        assert field in messages[message].fields_by_name
