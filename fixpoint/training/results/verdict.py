"""Findings on convergence in a record, in words; the same verdict as `fixpoint diagnose` gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fixpoint._messages import percent
from fixpoint.analysis.gap_verdict import equilibrium_verdict
from fixpoint.training.recipe.names import SOLVERS, run_label, short_name
from fixpoint.training.results.description import join_names
from fixpoint.training.results.store import Record

WORSE = 10
"""A training loss above this many times that of guessing counts as diverged."""


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
    parts = [sentence for sentence in (divergence(record), *_equilibrium([record])) if sentence]
    return " ".join(parts)


def row_names(rows: list[list[Record]]) -> list[str]:
    """Return a short name of each row of a table.

    That of an ERNN is its solver and backward, where these tell it apart from the other rows.
    """
    runs = [row[0]["run"] for row in rows]
    several = len({run.get("model") for run in runs}) > 1
    short = [_short(run, several) for run in runs]
    names = [
        name if short.count(name) == 1 else _name(row[0])
        for name, row in zip(short, rows, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _short(run: Mapping[str, Any], several: bool) -> str:
    solver = run.get("solver")
    if solver is None:
        return run_label(run)
    name = SOLVERS.get(solver, short_name(solver))
    steps = solver == "inexact-newton"
    text = f"K={run['max_iter']}" if steps else f"{name} {run.get('backward') or ''}".strip()
    return f"ERNN {text}" if several else text


def shared_findings(rows: list[list[Record]]) -> list[str]:
    """Return the findings of the rows of a table, once for those with the same verdict.

    Of each row the first seed counts, and every seed that diverged.
    """
    names = row_names(rows)
    alike: dict[tuple[str, ...], list[tuple[str, Record]]] = {}
    for name, row in zip(names, rows, strict=True):
        for record in row:
            lost = divergence(record)
            if lost:
                alike.setdefault((_sentences(record),), []).append((name, record))
            elif record is row[0] and record["contraction"]:
                verdict = _distance([record])[1:]
                alike.setdefault(("equilibrium", *verdict), []).append((name, record))
    return [
        f"{join_names(list(dict.fromkeys(name for name, _ in group)), names)}: "
        + (" ".join(_equilibrium([r for _, r in group])) if kind == "equilibrium" else kind)
        for (kind, *_), group in alike.items()
    ]


def _equilibrium(records: Sequence[Record]) -> list[str]:
    """Return the sentences about condition, steps and distance of models of one verdict."""
    found = [record["contraction"] for record in records if record["contraction"]]
    if not found:
        return []
    before, after = (
        _between([each[when]["fraction_holding"] for each in found], percent)
        for when in ("before", "after")
    )
    parts = [f"||I + eta f'|| < 1 at {after} of the states examined ({before} before training)."]
    counts = []
    for each in found:
        etas = [eta for row in each["after"]["eta"] for eta in row]
        counts.append((sum(eta < 0 for eta in etas), len(etas)))
    negative = list(dict.fromkeys(f"{n} of {count}" for n, count in counts if n))
    if negative:
        parts.append(
            f"{' and '.join(negative)} etas examined are negative, which breaks it wherever f' "
            "is negative."
        )
    return [*parts, *_distance(records)]


def _distance(records: Sequence[Record]) -> tuple[str, ...]:
    """Return how far the states are from equilibrium, and the verdict; () where not measured."""
    known = [r["gap"] for r in records if r.get("gap")]
    if known:
        distance, verdict = equilibrium_verdict(known[0], layers=len(records))
        if len(known) > 1:
            middle = _between([gap[1] for gap in known], "{:.2g}".format)
            distance = f"The median state is {middle} of its norm away from equilibrium."
        return distance, verdict
    means = [r["mean_residual"] for r in records if r["mean_residual"] is not None]
    if not means:
        return ()
    # Records of an earlier version have the mean alone.
    mean = _between(means, "{:.2g}".format)
    distance = f"The mean state is {mean} of its norm away from equilibrium."
    return distance, equilibrium_verdict((means[0],) * 3, layers=len(records))[1]


def _between(values: Sequence[float], text: Callable[[float], str]) -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"
