"""A group whose commands are imported when they are asked for, so that each starts fast."""

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Imports a command on first use.

    Args:
        places: by command name, where it is: "package.module:attribute".
        moved: by a name that a command had, the words that call it now.
    """

    def __init__(
        self,
        *args: Any,
        places: Mapping[str, str],
        moved: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._places = places
        self._moved = moved or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands of the table in its order, then those that were added."""
        return [*self._places, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported on first use; None when there is none of that name."""
        place = self._places.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{place} is no command")
        return command

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
