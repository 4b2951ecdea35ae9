"""Wording that several modules share: unknown names, missing extras, percentages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SomeFailed(RuntimeError):
    """Error of a command with failed runs, while others may have finished."""


OTHER_NAMES = {
    "max_iter": "K k n_iter n_iters num_iters max_iters maxiter max_steps iterations f_max_iter",
    "steps": "K k n n_iter max_iter grad",
    "rtol": "tol f_tol eps epsilon reltol xtol ftol tolerance",
    "atol": "abstol",
    "memory": "m M history history_size window",
    "beta": "alpha damping tau mixing",
    "eta": "alpha step step_size",
    "ridge": "lam",
    "solver": "f_solver",
    "eval_solver": "eval_factor eval_f_max_iter",
    "backward": "b_solver b_max_iter b_tol ift hook_ift grad",
    "z0": "z_init x0 y0 init",
    "f": "core func phi",
    "phi": "f func map",
    "timesteps": "T seq_len",
    "rank": "r R",
    "hidden_size": "n N hidden hidden_dim units",
    "hidden": "n N hidden_size hidden_dim units",
    "input_size": "d D input_dim in_features",
    "nonlinearity": "sigma activation",
    "map": "phi cell f func",
    "num_layers": "layers",
    "bidirectional": "bidir",
    "epochs": "n_epochs num_epochs max_epochs",
    "lr": "learning_rate step_size",
    "batch_size": "bs B",
    "optimizer": "optim",
    "weight_decay": "wd",
    "dataset": "data",
    "x": "X data features inputs",
    "y": "Y label labels target targets",
}
"""Options, keys and arrays, with what papers and other libraries call them."""


OF_SOLVERS = {
    "eta": "InexactNewton",
    **dict.fromkeys(("max_iter", "rtol", "atol", "norm", "leaf_atol"), "Anderson"),
    **dict.fromkeys(("keep_best", "record", "check_every", "memory", "beta"), "Anderson"),
}
"""Options of solvers, each with a solver that has it."""


def unknown_name(kind: str, given: object, known: Iterable[str], *, other: str = "") -> str:
    """Say that `given` is unknown, list the known names and what `other` would do, suggest one.

    >>> unknown_name("key", "bs", ["batch_size", "lr"])
    "unknown key 'bs': expected one of batch_size, lr; 'bs' is 'batch_size' here"
    """
    names = list(known)
    text = _expected(kind, given, names, other)
    meant = [name for name in meant_by(given) if name in names]
    if meant:
        return f"{text}; {given!r} is {meant[0]!r} here"
    near = _nearest(given, names)
    return f"{text}; did you mean {near!r}?" if near else text


def no_channel(table: str, given: str, columns: Iterable[str]) -> str:
    """Say that a table has no such channel, list its columns, suggest one.

    >>> no_channel("a.csv", "accx", ["acc_x", "time"])
    "a.csv has no channel 'accx': its columns are acc_x, time; did you mean 'acc_x'?"
    """
    names = list(columns)
    text = f"{table} has no channel {given!r}: its columns are {', '.join(names)}"
    near = _nearest(given, names)
    return f"{text}; did you mean {near!r}?" if near else text


def unknown_option(owner: str, given: str, known: Iterable[str]) -> str:
    """Say that `owner` has no option `given`, and which one it may stand for, or whose it is.

    >>> unknown_option("InexactNewton", "K", ["max_iter", "eta"])
    "unknown InexactNewton option 'K': expected one of max_iter, eta; 'K' is 'max_iter' here"
    >>> unknown_option("solve", "max_itr", ["phi", "solver"]).rpartition("; ")[2]
    'it is one of the solver: solver=Anderson(max_iter=...)'
    """
    names, kind = list(known), f"{owner} option"
    text = unknown_name(kind, given, names)
    if any(name in names for name in meant_by(given)):
        return text
    if "solver" in names:
        found = [name for name in (given, *meant_by(given)) if name in OF_SOLVERS]
        near = found[0] if found else _nearest(given, [*names, *OF_SOLVERS])
        if near in OF_SOLVERS:
            of = f"it is one of the solver: solver={OF_SOLVERS[near]}({near}=...)"
            return f"{_expected(kind, given, names)}; {of}"
    if given in ("backward", "on_failure"):
        return f"{text}; FixedPoint has it"
    return text


def refuse_unknown(owner: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError for the first option that `owner` does not have."""
    names = list(known)
    for name in options:
        if name not in names:
            raise TypeError(unknown_option(owner, name, names))


def meant_by(given: object) -> list[str]:
    """Return the options that a letter of a paper, or a name of another library, may stand for."""
    return [option for option, others in OTHER_NAMES.items() if given in others.split()]


def _expected(kind: str, given: object, names: list[str], other: str = "") -> str:
    other = f", or {other}" if other else ""
    return f"unknown {kind} {given!r}: expected one of {', '.join(names)}{other}"


SAME = {"gpu": "cuda"}
"""Values by another name that users give them."""


def _nearest(given: object, names: Iterable[str]) -> str | None:
    lower = {str(name).lower(): name for name in names}
    if (same := SAME.get(str(given).lower())) in lower:
        return same
    near = difflib.get_close_matches(str(given).lower(), lower, n=1)
    return lower[near[0]] if near else None


def missing_extra(what: str, package: str, extra: str) -> ImportError:
    """Return the error for `what` where a package of an extra is not installed."""
    return ImportError(
        f"{what} needs {package}, which is not installed: pip install 'torch-fixpoint[{extra}]'"
    )


def percent(fraction: float, digits: int | None = None) -> str:
    """Return a fraction in percent, by `digits` behind the point, or else by three digits.

    Rounding to three digits turns no part into all.

    >>> percent(0.9734), percent(0.9734, 1), percent(0.99999)
    ('97.3 %', '97.3 %', '> 99.9 %')
    """
    if digits is not None:
        return f"{100 * fraction:.{digits}f} %"
    text = f"{100 * fraction:.3g}"
    return f"{'> 99.9' if text == '100' and fraction < 1 else text} %"


def printable(text: str) -> str:
    r"""Return the text with control characters escaped, so that a name cannot steer a terminal.

    >>> printable("runs\x1b[31m")
    'runs\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
