"""A group of commands that suggests one for a misspelled name."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from fixpoint._messages import unknown_name
from fixpoint.cli.errors import fail


class NamedCommands(TyperGroup):
    """Group that answers an unknown command with the known ones and the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            fail(unknown_name("command", args[0], known))
        return super().resolve_command(ctx, args)
