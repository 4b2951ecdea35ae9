"""The message for a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, given: object, known: Iterable[str], *, other: str = "") -> str:
    """Say that `given` is unknown, list the known names and what `other` would do, suggest one."""
    names = list(known)
    lower = {str(name).lower(): name for name in names}
    near = difflib.get_close_matches(str(given).lower(), lower, n=1)
    hint = f"; did you mean {lower[near[0]]!r}?" if near else ""
    other = f", or {other}" if other else ""
    return f"unknown {kind} {given!r}: expected one of {', '.join(names)}{other}{hint}"
