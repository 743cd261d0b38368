"""A group whose commands are imported when they are asked for, so that each starts fast."""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import click


class Place(NamedTuple):
    """Where a command is, and its line in the group's help.

    Attributes:
        path: "package.module:attribute".
        summary: first sentence of the command's help, so that the group's help imports nothing.
    """

    path: str
    summary: str


class LazyGroup(click.Group):
    """Imports a command on first use.

    Args:
        places: by command name, where it is.
        moved: by a name that a command had, the words that call it now.
    """

    def __init__(
        self,
        *args: Any,
        places: Mapping[str, Place],
        moved: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._places = places
        self._moved = moved or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands of the table, in its order."""
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported on first use; None when there is none of that name.

        Raises:
            ClickException: a package that the command needs is not installed.
        """
        place = self._places.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.path.partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("controller", "pointsman"):
                raise
            raise click.ClickException(
                f"{ctx.command_path} {cmd_name} needs the package {error.name}; install Pointsman "
                "with the extra `train`"
            ) from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{place.path} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands as click does, from the table."""
        longest = max(len(name) for name in self._places)
        limit = formatter.width - 6 - longest
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, click.Command(name, help=place.summary).get_short_help_str(limit))
                    for name, place in self._places.items()
                ]
            )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names.

        Raises:
            UsageError: there is none of that name; one that moved is named.
        """
        if args and args[0] in self._moved:
            ctx.fail(
                f"'{args[0]}' has moved: use '{ctx.command_path} {self._moved[args[0]]}'. "
                f"See '{ctx.command_path} {self._moved[args[0]]} --help'."
            )
        return super().resolve_command(ctx, args)
