"""What a record says of convergence, in words; the same verdict as `fixpoint diagnose` gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fixpoint._messages import percent
from fixpoint.analysis.gap_verdict import equilibrium_verdict
from fixpoint.training.recipe.names import SOLVERS, run_label, short_name
from fixpoint.training.results.store import Record

WORSE = 10
"""A training loss above so many times that of guessing counts as diverged."""


def divergence(record: Record) -> str | None:
    """Return a sentence if the training diverged, else None."""
    epochs, run = record["epochs"], record["run"]
    remedy = f"lower training.lr ({run['lr']:g}) or set training.clip"
    loss = record["loss"]
    if loss is None or not math.isfinite(loss):
        return (
            f"The training diverged in epoch {len(epochs)} of {run['epochs']} and was stopped: "
            f"its loss is not finite; {remedy}."
        )
    guess = record.get("guessing_loss")
    if guess and loss > WORSE * guess and not (len(epochs) == 1 and _learned(record, guess)):
        return (
            f"The training diverged: its loss is {loss:.2g}, that of guessing {guess:.2g}; "
            f"{remedy}."
        )
    return None


def _learned(record: Record, guess: float) -> bool:
    """Tell whether a model is more accurate than guessing by its classes' frequencies.

    The mean loss of a first epoch may be that of its first batches alone.
    """
    accuracy = record["accuracy_last"] if record["metric"] == "accuracy" else None
    return accuracy is not None and accuracy > 110 * math.exp(-guess)


def findings(record: Record) -> str | None:
    """Say whether the training diverged, and whether an ERNN equilibrates.

    None where there is nothing to say, as of an LSTM that was trained well.
    """
    text = _sentences(record)
    return f"{_name(record)}: {text}" if text else None


def _name(record: Record) -> str:
    backward = record["run"]["backward"]
    return run_label(record["run"]) + (f", {backward}" if backward else "")


def _sentences(record: Record) -> str:
    parts = [sentence for sentence in (divergence(record), *_equilibrium(record)) if sentence]
    return " ".join(parts)


def row_names(rows: list[list[Record]]) -> list[str]:
    """Return a short name of each row: of an ERNN its solver and backward, where these tell it
    apart.
    """
    runs = [row[0]["run"] for row in rows]
    whole = [
        ", ".join([run_label(run), *([run["backward"]] if run.get("backward") else [])])
        for run in runs
    ]
    short = [_short(run) or name for run, name in zip(runs, whole, strict=True)]
    names = short if len(set(short)) == len(short) else whole
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _short(run: Mapping[str, Any]) -> str:
    solver = run.get("solver")
    if solver is None:
        return ""
    if solver == "inexact-newton":
        return f"K={run['max_iter']}"
    return f"{SOLVERS.get(solver, short_name(solver))} {run.get('backward') or ''}".strip()


def shared_findings(records: list[Record]) -> list[str]:
    """Return `findings` of several records, where those that say the same are said once."""
    by_text: dict[str, list[str]] = {}
    for record in records:
        name, found = _name(record), _sentences(record)
        if found:
            by_text.setdefault(found, []).append(name)
    return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in by_text.items()]


def _equilibrium(record: Record) -> list[str]:
    if not record["contraction"]:
        return []
    before, after = record["contraction"]["before"], record["contraction"]["after"]
    parts = [
        f"||I + eta f'|| < 1 at {percent(after['fraction_holding'])} of the states examined "
        f"({percent(before['fraction_holding'])} before training)."
    ]
    etas = [eta for row in after["eta"] for eta in row]
    negative = sum(eta < 0 for eta in etas)
    if negative:
        parts.append(
            f"{negative} of {len(etas)} etas examined are negative, which breaks it wherever f' "
            "is negative."
        )
    return [*parts, *_distance(record)]


def _distance(record: Record) -> tuple[str, ...]:
    mean, quantiles = record["mean_residual"], record.get("gap")
    if quantiles:
        return equilibrium_verdict(quantiles)
    if mean is None:
        return ()
    # A record of an earlier version, which has the mean alone.
    distance = f"The mean state is {mean:.2g} of its norm away from equilibrium."
    return distance, equilibrium_verdict((mean, mean, mean))[1]
