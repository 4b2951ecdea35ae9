"""The verdict of a comparison in three lines: accuracy, time, equilibrium."""

from __future__ import annotations

import statistics

from fixpoint._messages import percent
from fixpoint.training.results.aggregate import groups, mean_and_sd
from fixpoint.training.results.description import join_names
from fixpoint.training.results.store import Record
from fixpoint.training.results.verdict import divergence, row_names

CLOSE = 0.05
"""Mean relative residual below which states count as near their equilibrium."""


def summary(records: list[Record]) -> list[str]:
    """Return which rows are most accurate within the spread, which is fastest, which equilibrate.

    Nothing of one row alone.
    """
    rows = groups(records)
    if len(rows) < 2:
        return []
    names = dict(zip(map(id, rows), row_names(rows), strict=True))
    good = [row for row in rows if not any(map(divergence, row))]
    if not good:
        return ["Verdict: every training diverged."]
    return [
        f"Most accurate: {_most_accurate(good, names)}.",
        f"Fastest: {_fastest(good, names)}.",
        *([text] if (text := _equilibrating(good, names)) else []),
    ]


def _most_accurate(rows: list[list[Record]], names: dict[int, str]) -> str:
    metric = rows[0][0]["metric"]
    sign, unit = (1, " %") if metric == "accuracy" else (-1, "")
    scores = {id(row): [r[f"{metric}_last"] for r in row] for row in rows}
    best = max(rows, key=lambda row: sign * statistics.fmean(scores[id(row)]))
    mean = statistics.fmean(scores[id(best)])
    spread = _spread(best, scores[id(best)])
    near = [
        row
        for row in rows
        if row is not best
        and sign * (mean - statistics.fmean(scores[id(row)]))
        <= spread + _spread(row, scores[id(row)])
    ]
    text = f"{names[id(best)]}, {mean_and_sd(scores[id(best)], 2)}{unit}"
    several = max(map(len, scores.values())) > 1
    within = "within the spread" if several else "as good, as far as one seed tells"
    if not near:
        return text
    if len(near) == len(rows) - 1:
        return f"{text}; {within}: all others"
    others = join_names([names[id(row)] for row in near], list(names.values()))
    return f"{text}; {within}: {others}"


def _spread(row: list[Record], scores: list[float]) -> float:
    """Return standard deviation over seeds; of one seed that of counting the test windows."""
    if len(scores) > 1:
        return statistics.stdev(scores)
    confusion = row[0].get("confusion")
    if not confusion:
        return 0.0
    p, count = scores[0] / 100, sum(map(sum, confusion))
    return float(100 * (p * (1 - p) / max(count, 1)) ** 0.5)


def _fastest(rows: list[list[Record]], names: dict[int, str]) -> str:
    if any(len(r["epochs"]) == 1 for row in rows for r in row):
        return "not known from one epoch, which may compile: take --epochs 2 or more"
    seconds = {id(row): statistics.fmean(r["seconds_per_epoch"] for r in row) for row in rows}
    ordered = sorted(rows, key=lambda row: seconds[id(row)])
    first, last = ordered[0], ordered[-1]
    text = f"{names[id(first)]}, {seconds[id(first)]:.2f} s an epoch"
    if first is last:
        return text
    times = seconds[id(last)] / max(seconds[id(first)], 1e-9)
    return f"{text}; {names[id(last)]} takes {times:.0f} times as long"


def _equilibrating(rows: list[list[Record]], names: dict[int, str]) -> str:
    gaps = {
        id(row): statistics.fmean(known)
        for row in rows
        if (known := [r["mean_residual"] for r in row if r.get("mean_residual") is not None])
    }
    if not gaps:
        return ""
    near = [row for row in rows if gaps.get(id(row), 1.0) <= CLOSE]
    far = [row for row in rows if gaps.get(id(row), 0.0) > CLOSE]
    parts = []
    if near:
        worst = max(gaps[id(row)] for row in near)
        parts.append(
            f"At equilibrium (within {percent(worst)}): "
            f"{join_names([names[id(row)] for row in near], list(names.values()))}"
        )
    if far:
        least = min(gaps[id(row)] for row in far)
        who = join_names([names[id(row)] for row in far], list(names.values()))
        parts.append(
            f"{'not' if near else 'None is at equilibrium'}: {who} (from {percent(least)})"
        )
    return "; ".join(parts) + "."
