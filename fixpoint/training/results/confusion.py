"""Confusion matrices of records: on the page, on the terminal, in LaTeX, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fixpoint.training.results.report_charts import Line
from fixpoint.training.results.store import Record
from fixpoint.training.results.table import FittingTable

MOST_CLASSES = 40
"""Classes that a page has room for."""


def total_confusion(records: Sequence[Record]) -> list[list[int]] | None:
    """Return windows of each class (row) by the predicted one, over all seeds; None where none has
    it.
    """
    found = [record["confusion"] for record in records if record.get("confusion")]
    if not found:
        return None
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]


def by_class(confusion: list[list[int]]) -> list[tuple[float | None, float | None]]:
    """Return recall and F1 of each class in percent; None of a class without windows.

    >>> by_class([[1, 1], [0, 1]])
    [(50.0, 66.66666666666667), (100.0, 66.66666666666667)]
    """
    named = [sum(column) for column in zip(*confusion, strict=True)]
    scores: list[tuple[float | None, float | None]] = []
    for i, row in enumerate(confusion):
        true, right = sum(row), row[i]
        scores.append(
            (100 * right / true, 200 * right / (true + named[i])) if true else (None, None)
        )
    return scores


def confusions(lines: list[Line]) -> list[dict[str, Any]]:
    """Return values of the page, for each line of its table that has a matrix."""
    found = []
    for line in lines:
        matrix = total_confusion(line.records)
        if matrix is None or len(matrix) > MOST_CLASSES:
            continue
        classes = line.records[0]["classes"]
        rows = [
            {
                "name": name,
                "cells": [{"count": n, "shade": f"{0.7 * n / max(sum(row), 1):.2f}"} for n in row],
                "recall": _number(recall),
                "f1": _number(f1),
            }
            for name, row, (recall, f1) in zip(classes, matrix, by_class(matrix), strict=True)
        ]
        found.append({"name": line.name, "detail": line.detail, "classes": classes, "rows": rows})
    return found


def confusion_table(record: Record) -> FittingTable | None:
    """Return the matrix of one record, for the terminal; None where it has none or too many
    classes.
    """
    matrix = total_confusion([record])
    if matrix is None or len(matrix) > MOST_CLASSES:
        return None
    classes = record["classes"]
    rows = [
        ([name], [_number(recall), _number(f1), *map(str, row)])
        for name, row, (recall, f1) in zip(classes, matrix, by_class(matrix), strict=True)
    ]
    title = "Test windows of each class by the predicted one (columns)"
    return FittingTable(title, ["true class"], ["recall\n%", "F1\n%", *classes], rows)


def draw_confusion(record: Record, path: Path) -> Path | None:
    """Save the matrix of a record as a picture; None where it has none or too many classes."""
    matrix = total_confusion([record])
    if matrix is None or len(matrix) > MOST_CLASSES:
        return None
    from fixpoint.analysis.plots import confusion_figure

    confusion_figure(matrix, record["classes"]).savefig(path, bbox_inches="tight")
    return path


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
