"""A group of commands that suggests one for a misspelled name."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from fixpoint._messages import unknown_name
from fixpoint.cli.errors import fail
from fixpoint.cli.given import check_options


class NamedCommands(TyperGroup):
    """Group that answers an unknown command with the known ones and the nearest, and checks what is
    given to the others.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            fail(unknown_name("command", args[0], known))
        name, command, rest = super().resolve_command(ctx, args)
        command = self.imported(name, command)
        if isinstance(command, TyperCommand):
            check_options(command, rest)
        return name, command, rest

    def imported(self, name: str | None, command: Any) -> Any:
        """Return the command of that name, which may be kept in a module of its own."""
        return command
