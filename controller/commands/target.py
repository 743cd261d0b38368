"""What every command that asks a controller shares: its options, its call, its errors."""

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import grpc
from click.core import ParameterSource
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from controller.client import Client, ConnectError, Connection, connected
from pointsman.v1 import types_pb2

T = TypeVar("T")


class CommandFailedError(click.ClickException):
    """A failure of exit code 1, told in one sentence."""

    exit_code = 1


class WrongUsage(click.ClickException):
    """Wrong usage, exit code 2."""

    exit_code = 2


def text(value: str) -> str:
    """A parameter's type: text that the wire can carry.

    Bytes that are not UTF-8 reach Python as lone surrogates.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise click.BadParameter("not valid UTF-8; check the terminal's encoding") from error
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Which controller a command asks, and how it prints."""

    connection: Connection
    as_json: bool


def asks_controller(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name the controller, and give the command what they say as `target`.

    A subcommand that is not told something itself takes what its group was told.
    """

    @functools.wraps(command)
    def run(
        *arguments: Any,
        address: str,
        insecure: bool,
        ca_file: Path | None,
        as_json: bool,
        **others: Any,
    ) -> Any:
        context = click.get_current_context()
        target = Target(Connection(address, insecure, ca_file), as_json)
        if isinstance(context.obj, Target):
            target = _merged(context, context.obj, target)
        context.obj = target
        return command(*arguments, target=target, **others)

    wrapped: Callable[..., Any] = run
    for option in (
        click.option(
            "--ca-file",
            type=click.Path(dir_okay=False, path_type=Path),
            envvar="POINTSMAN_CA_FILE",
            help="PEM of the authority that signed the controller's certificate.",
        ),
        click.option(
            "--insecure", is_flag=True, envvar="POINTSMAN_INSECURE", help="Connect without TLS."
        ),
        click.option(
            "--controller",
            "address",
            default="localhost:50551",
            show_default=True,
            envvar="POINTSMAN_CONTROLLER",
            help="Address (host:port) of the controller.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    ):
        wrapped = option(wrapped)
    return wrapped


def _merged(context: click.Context, group: Target, own: Target) -> Target:
    def is_told(name: str) -> bool:
        return context.get_parameter_source(name) is ParameterSource.COMMANDLINE

    return Target(
        Connection(
            own.connection.address if is_told("address") else group.connection.address,
            own.connection.insecure or group.connection.insecure,
            own.connection.ca_file if is_told("ca_file") else group.connection.ca_file,
        ),
        own.as_json or group.as_json,
    )


def call_controller(target: Target, action: Callable[[Client], Awaitable[T]]) -> T:
    """What the action gives, asked of the controller that the options name."""

    async def run() -> T:
        async with connected(target.connection) as client:
            return await action(client)

    return run_to_end(run())


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """What the coroutine gives; an error status becomes a sentence and an exit code."""
    try:
        return asyncio.run(work)
    except ConnectError as error:
        raise CommandFailedError(str(error)) from error
    except grpc.aio.AioRpcError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise click.Abort from None


def _fail(error: grpc.aio.AioRpcError) -> NoReturn:
    wrong = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    text = error.details() or error.code().name
    if error.code() in wrong:
        raise WrongUsage(text) from error
    raise CommandFailedError(f"{error.code().name.lower()}: {text}") from error


@contextlib.contextmanager
def library_output_to_stderr() -> Iterator[None]:
    """What libraries print meanwhile, also from C, goes to standard error.

    HiGHS prints a line of its own in a rare case, whatever it is told, and what a program reads
    as JSON would begin with it.
    """
    sys.stdout.flush()
    try:
        ours = os.dup(1)
    except OSError:  # closed
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        _flush_c()
        os.dup2(ours, 1)
        os.close(ours)


def _flush_c() -> None:
    """Write what C code has printed but not written; a pipe makes it wait in a buffer."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def print_json(message: Message) -> None:
    """Print one message as one object."""
    click.echo(json.dumps(to_json(message), indent=2, ensure_ascii=False))


def to_json(message: Message) -> dict[str, Any]:
    """A message with the field names of the .proto files and every default filled in."""
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def parse_weights(text: str) -> types_pb2.ObjectiveWeights:
    """Weights from "quality,cost,energy,time"; anything else is wrong usage."""
    try:
        quality, cost, energy, time = (float(part) for part in text.split(","))
    except ValueError as error:
        raise WrongUsage(
            f"--weights: four numbers quality,cost,energy,time, not {text!r}"
        ) from error
    return types_pb2.ObjectiveWeights(quality=quality, cost=cost, energy=energy, time=time)
