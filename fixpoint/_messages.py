"""Wording that several modules share: unknown names, missing extras, percentages."""

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


def missing_extra(what: str, package: str, extra: str) -> ImportError:
    """The error for `what` where a package of an extra is not installed."""
    return ImportError(
        f"{what} needs {package}, which is not installed: pip install 'torch-fixpoint[{extra}]'"
    )


def percent(fraction: float, digits: int | None = None) -> str:
    """A fraction in percent, by `digits` behind the point, or else by three digits.

    Rounding to three digits turns no part into all.

    >>> percent(0.9734), percent(0.9734, 1), percent(0.99999)
    ('97.3 %', '97.3 %', '> 99.9 %')
    """
    if digits is not None:
        return f"{100 * fraction:.{digits}f} %"
    text = f"{100 * fraction:.3g}"
    return f"{'> 99.9' if text == '100' and fraction < 1 else text} %"


def printable(text: str) -> str:
    r"""The text with control characters escaped, so that a name cannot steer a terminal.

    >>> printable("runs\x1b[31m")
    'runs\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
