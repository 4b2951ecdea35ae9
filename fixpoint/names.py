"""The message for a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, given: object, known: Iterable[str]) -> str:
    """Say that `given` is unknown, list the known names and suggest the nearest."""
    names = list(known)
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {given!r}: expected one of {', '.join(names)}{hint}"
