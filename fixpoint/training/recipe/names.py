"""Names that people use, for models, solvers and cells of a record."""

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
CELLS = {"jordan": "Jordan"}


def run_label(run: Mapping[str, Any]) -> str:
    """Return the short name of what is compared: the model, of an ERNN also K, solver and cell.

    Args:
        run: values by key of a recipe.

    Example:
        >>> from fixpoint.training import Recipe
        >>> from fixpoint.training.recipe.names import run_label
        >>> run_label({"model": "ernn", "solver": "picard", "cell": "self-feedback"})
        'ERNN (Picard, self-feedback)'
        >>> run_label({"model": "ernn", "solver": "inexact-newton", "max_iter": 1, "rank": 0})
        'ERNN K=1 (inexact Newton, no self-feedback)'
        >>> run_label(Recipe().changed(model="lstm").flat)
        'LSTM'
    """
    model, solver, cell = (run.get(name) for name in ("model", "solver", "cell"))
    name = MODELS.get(str(model), short_name(model))
    if solver is None:
        return name
    steps = f" K={run['max_iter']}" if solver == "inexact-newton" else ""
    parts = [
        SOLVERS.get(solver, short_name(solver)),
        *([CELLS.get(cell, short_name(cell))] if cell else []),
        *(["no self-feedback"] if run.get("rank") == 0 else []),
    ]
    return f"{name}{steps} ({', '.join(parts)})"


def short_name(name: object) -> str:
    """Return the class of "package.module:Class"; other names are as they are."""
    return str(name).rpartition(":")[2]
