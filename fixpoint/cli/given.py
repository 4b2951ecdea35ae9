"""Options given twice, and options or arguments without a value, on one command line."""

from __future__ import annotations

from typing import Any

from fixpoint.cli.errors import fail


def check_options(command: Any, arguments: list[str]) -> None:
    """Exit with one line where an option is given twice, or anything is empty.

    Lists of nothing but commas are empty too. Options that may be repeated, as --set, are left to
    their command.
    """
    known = {name: option for option in command.params for name in option.opts}
    seen: dict[str, str] = {}
    i = 0
    while i < len(arguments) and arguments[i] != "--":
        name, equals, value = arguments[i].partition("=")
        option = known.get(name) if name.startswith("-") else None
        i += 1
        if option is None:
            if not arguments[i - 1].strip():
                fail("an argument is empty: give a value, or leave it out")
            continue
        if not equals and not option.is_flag:
            value = arguments[i] if i < len(arguments) else "-"
            i += 1
        if not value.strip(" ,") and not option.is_flag:
            fail(f"{name} is empty: give a value, or leave it out")
        if not option.multiple and option.name in seen:
            fail(f"{name} is given twice{_as(name, seen[option.name])}: give it once")
        seen[option.name] = name


def _as(name: str, before: str) -> str:
    return "" if name == before else f", once as {before}"
