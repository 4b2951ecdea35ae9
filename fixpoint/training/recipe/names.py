"""Names that people use, for models, solvers and maps of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODELS = {
    "ernn": "ERNN",
    "rnn": "RNN",
    "lstm": "LSTM",
    "gru": "GRU",
    "fastrnn": "FastRNN",
    "fastgrnn": "FastGRNN",
    "ugrnn": "UGRNN",
    "spectralrnn": "SpectralRNN",
    "eurnn": "EURNN",
}
SOLVERS = {
    "inexact-newton": "inexact Newton",
    "picard": "Picard",
    "anderson": "Anderson",
    "broyden": "Broyden",
    "newton": "Newton",
    "newton-krylov": "Newton-Krylov",
    "barzilai-borwein": "Barzilai-Borwein",
    "levenberg-marquardt": "Levenberg-Marquardt",
    "squarem": "SQUAREM",
    "damped-picard": "damped Picard",
    "auto": "auto",
    "scipy": "SciPy",
}
MAPS = {"jordan": "Jordan"}


def run_label(run: Mapping[str, Any]) -> str:
    """Return the short name of what is compared: the model, of an ERNN with K, solver and map, of
    a layer with gates with another start than its own.

    Args:
        run: values by key of a recipe.

    Example:
        >>> from fixpoint.training import Recipe
        >>> from fixpoint.training.recipe.names import run_label
        >>> run_label({"model": "ernn", "solver": "picard", "map": "self-feedback"})
        'ERNN (Picard, self-feedback)'
        >>> run_label({"model": "ernn", "solver": "inexact-newton", "max_iter": 1, "rank": 0})
        'ERNN K=1 (inexact Newton, no self-feedback)'
        >>> run_label(Recipe().changed(model="lstm", init="chrono").flat)
        'LSTM (chrono)'
    """
    model, solver, phi = (run.get(name) for name in ("model", "solver", "map"))
    name = MODELS.get(str(model), short_name(model))
    if solver is None:
        return f"{name} (chrono)" if run.get("init") == "chrono" else name
    steps = f" K={run['max_iter']}" if solver == "inexact-newton" else ""
    parts = [
        SOLVERS.get(solver, short_name(solver)),
        *([MAPS.get(phi, short_name(phi))] if phi else []),
        *(["no self-feedback"] if run.get("rank") == 0 else []),
    ]
    return f"{name}{steps} ({', '.join(parts)})"


def short_name(name: object) -> str:
    """Return the class of "package.module:Class"; other names are as they are."""
    return str(name).rpartition(":")[2]
