"""Description of an ERNN of a record in words: map, solver, backward, steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fixpoint.training.recipe.names import SOLVERS, short_name

Run = Mapping[str, Any]

MAPS = {
    "jordan": "{sigma}((I + U)(V h + W x + b))",
    "self-feedback": "{sigma}(U h + V h_prev + W x + b)",
    "identity-feedback": "{sigma}(h + V h_prev + W x + b)",
    "linear": "U h + V h_prev + W x + b",
    "manifold": "{sigma}(U (h + h_prev) + W x + b) / gamma - h_prev",
}
BACKWARDS = {
    "unrolled": "gradient through the updates",
    "implicit": "gradient by an adjoint solve at the solution",
    "phantom": "gradient through one update at the solution",
}


def descriptions(named: Iterable[tuple[str, Run]]) -> list[tuple[str, str]]:
    """Return names and description of the ERNNs of a table; other models have none.

    Those that differ in solver, backward or number of learned steps share one.

    Args:
        named: name and run of each row.
    """
    alike: dict[tuple[Any, ...], list[tuple[str, Run]]] = {}
    every = list(named)
    for name, run in every:
        if run.get("map"):
            alike.setdefault(_model(run), []).append((name, run))
    names = [name for name, _ in every]
    return [
        (join_names([name for name, _ in rows], names), describe(*(run for _, run in rows)))
        for rows in alike.values()
    ]


def join_names(some: Sequence[str], every: Sequence[str]) -> str:
    """Return names of rows in a line: "Picard" for all rows of Picard, where there are several.

    Example:
        >>> from fixpoint.training.results.description import join_names
        >>> rows = ["K=1", "Picard unrolled", "Picard implicit", "Anderson implicit"]
        >>> join_names(rows[1:], rows), join_names(rows[2:], rows)
        ('Picard, Anderson implicit', 'Picard implicit, Anderson implicit')
    """
    short: dict[str, None] = {}
    for name in some:
        solver, _, backward = name.rpartition(" ")
        same = [other for other in every if other.rpartition(" ")[0] == solver]
        whole = backward in BACKWARDS and len(same) > 1 and set(same) <= set(some)
        short[solver if whole else name] = None
    return ", ".join(short)


def describe(*runs: Run) -> str:
    """Return the map, how often or how far it is iterated, and how it is differentiated.

    Args:
        runs: values by key of recipes, with the defaults of an ERNN filled in; several differ in
            solver, backward or number of learned steps alone.

    Example:
        >>> from fixpoint.training.results.description import describe
        >>> describe({"map": "linear", "solver": "picard", "rtol": 0.01, "backward": "implicit"})
        'h = U h + V h_prev + W x + b, solved by Picard to rtol 0.01; gradient by an adjoint solve at the solution'
    """  # noqa: E501
    backwards = list(dict.fromkeys(str(run.get("backward")) for run in runs))
    words = [BACKWARDS.get(backward, backward) for backward in backwards]
    gradient = words[0]
    if len(words) > 1:
        pairs = zip(words, backwards, strict=True)
        own = [f"{text.removeprefix('gradient ')} ({backward})" for text, backward in pairs]
        gradient = f"gradient {' or '.join(own)}"
    return f"{_solve(runs)}{_weights(runs[0])}; {gradient}"


def _model(run: Run) -> tuple[Any, ...]:
    """Return what makes a run's model, whatever its solver, backward and number of steps."""
    learned = run["solver"] == "inexact-newton"
    how = () if learned else (run.get("max_iter"), run.get("rtol"))
    return (learned, _phi(run), _weights(run), *how)


def _phi(run: Run) -> str:
    text = MAPS.get(run["map"], f"{short_name(run['map'])}(h, h_prev, x)")
    return text.format(sigma=_nonlinearity(run))


def _solve(runs: Sequence[Run]) -> str:
    run, phi = runs[0], _phi(runs[0])
    if run["solver"] == "inexact-newton":
        counts = sorted({int(r.get("max_iter") or 1) for r in runs})
        steps = "1 step" if counts == [1] else f"{' or '.join(map(str, counts))} steps"
        return f"{steps} h + eta (phi - h) from h_prev, eta learned, phi = {phi}"
    most = f", at most {run['max_iter']} updates" if run.get("max_iter") else ""
    solvers = {str(r["solver"]) for r in runs}
    solver = run["solver"]
    by = f" by {SOLVERS.get(solver, short_name(solver))}" if len(solvers) == 1 else ""
    to = "" if run.get("rtol") is None else f" to rtol {run['rtol']:g}"
    return f"h = {phi}, solved{by}{to}{most}"


def _weights(run: Run) -> str:
    parts = []
    if run.get("rank"):
        parts.append(f"U of rank {run['rank']}")
    if run.get("bound"):
        parts.append(f"||U||_2 = {run['bound']:g}")
    if run.get("init") == "identity":
        gain = f", W times {run['input_gain']:g}" if run.get("input_gain") else ""
        parts.append(f"V = I - U{gain} at the start")
    return f", {', '.join(parts)}" if parts else ""


def _nonlinearity(run: Run) -> str:
    return str(run.get("nonlinearity") or ("relu" if run["map"] == "jordan" else "tanh"))
