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


SYNONYMS = {
    **dict.fromkeys(("K", "k", "n_iter", "max_iters", "maxiter", "f_max_iter"), "max_iter"),
    **dict.fromkeys(("T", "seq_len"), "timesteps"),
    **dict.fromkeys(("m", "M", "history_size"), "memory"),
    **dict.fromkeys(("tol", "f_tol", "eps", "epsilon"), "rtol"),
    **dict.fromkeys(("alpha", "damping", "tau"), "beta"),
    **dict.fromkeys(("r", "R"), "rank"),
    **dict.fromkeys(("n", "N", "hidden_dim", "hidden"), "hidden_size"),
    **dict.fromkeys(("d", "D", "input_dim"), "input_size"),
    **dict.fromkeys(("sigma", "activation"), "nonlinearity"),
    **dict.fromkeys(("phi", "map"), "cell"),
    "lam": "ridge",
    "layers": "num_layers",
}
"""Letters of papers, and names of other libraries, with the option that they stand for."""


OF_SOLVERS = {
    "eta": "InexactNewton",
    **dict.fromkeys(("rtol", "atol", "memory", "beta"), "Anderson"),
}
"""Options of solvers, each with a solver that has it."""


def unknown_option(owner: str, given: str, known: Iterable[str]) -> str:
    """Say that `owner` has no option `given`, and which one a letter of a paper stands for.

    >>> unknown_option("InexactNewton", "K", ["max_iter", "eta"])
    "unknown InexactNewton option 'K': expected one of max_iter, eta; 'K' is 'max_iter' here"
    """
    names = list(known)
    meant = SYNONYMS.get(given, given)
    text = f"unknown {owner} option {given!r}: expected one of {', '.join(names)}"
    if meant in names:
        return f"{text}; {given!r} is {meant!r} here"
    if meant in OF_SOLVERS and "solver" in names:
        return f"{text}; it is one of the solver: solver={OF_SOLVERS[meant]}({meant}=...)"
    return unknown_name(f"{owner} option", given, names)


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
