"""What an ERNN of a record is, in words: cell, solver, backward, steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fixpoint.training.recipe.names import SOLVERS, run_label, short_name

CELLS = {
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


def descriptions(runs: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Name and description of each ERNN among runs, each once; other models have none."""
    named = {_name(run): describe(run) for run in runs if run.get("cell")}
    return list(named.items())


def describe(run: Mapping[str, Any]) -> str:
    """Return the map, how often or how far it is iterated, and how it is differentiated.

    Args:
        run: values by key of a recipe, with the defaults of an ERNN filled in.

    Example:
        >>> from fixpoint.training.results.description import describe
        >>> describe({"cell": "linear", "solver": "picard", "rtol": 0.01, "backward": "implicit"})
        'h = U h + V h_prev + W x + b, solved by Picard to rtol 0.01; gradient by an adjoint solve at the solution'
    """  # noqa: E501
    phi = CELLS.get(run["cell"], f"{short_name(run['cell'])}(h, h_prev, x)").format(
        sigma=_nonlinearity(run)
    )
    backward = BACKWARDS.get(str(run.get("backward")), str(run.get("backward")))
    return f"{_solve(run, phi)}{_weights(run)}; {backward}"


def _solve(run: Mapping[str, Any], phi: str) -> str:
    K, solver = run.get("max_iter"), str(run["solver"])
    if solver == "inexact-newton":
        steps = "1 step" if K == 1 else f"{K} steps"
        return f"{steps} h + eta (phi - h) from h_prev, eta learned, phi = {phi}"
    most = f", at most {K} updates" if K else ""
    name = SOLVERS.get(solver, short_name(solver))
    to = "" if run.get("rtol") is None else f" to rtol {run['rtol']:g}"
    return f"h = {phi}, solved by {name}{to}{most}"


def _weights(run: Mapping[str, Any]) -> str:
    parts = []
    if run.get("rank"):
        parts.append(f"U of rank {run['rank']}")
    if run.get("bound"):
        parts.append(f"||U||_2 = {run['bound']:g}")
    if run.get("init") == "identity":
        parts.append("V = I - U at the start")
    return f", {', '.join(parts)}" if parts else ""


def _nonlinearity(run: Mapping[str, Any]) -> str:
    return str(run.get("nonlinearity") or ("relu" if run["cell"] == "jordan" else "tanh"))


def _name(run: Mapping[str, Any]) -> str:
    return ", ".join([run_label(run), *([run["backward"]] if run.get("backward") else [])])
