"""Records of several seeds as one row of numbers: the columns and their format."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from fixpoint.training.results.store import Record


class Column(NamedTuple):
    """A number of a record: what stands above it, where it is found, its digits, in which unit.

    `digits` are those behind the point; None for two significant ones.
    """

    head: str
    field: str
    digits: int | None
    factor: float = 1

    def values(self, records: Iterable[Record]) -> list[float]:
        """Return the numbers that the records have."""
        found = [self.of(record) for record in records]
        return [value for value in found if value is not None]

    def of(self, record: Record) -> float | None:
        """Return the number of one record; `field` may be a path, as contraction/after/norm."""
        value: object = record
        for name in self.field.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        return self.factor * value if isinstance(value, int | float) else None

    def text(self, records: Iterable[Record], joint: str = " ± ") -> str:
        return mean_and_sd(self.values(records), self.digits, joint=joint)


def columns(metric: str) -> tuple[Column, ...]:
    """Return the columns of a table, the most important first."""
    unit = "acc. %" if metric == "accuracy" else "perplexity"
    return (
        Column(f"last {unit}", f"{metric}_last", 2),
        Column(f"best {unit}", f"{metric}_best", 2),
        Column("by validation", f"{metric}_chosen", 2),
        Column("macro F1", "macro_f1", 2),
        Column("macro recall", "macro_recall", 2),
        Column("train loss", "loss", 3),
        Column("s / epoch", "seconds_per_epoch", 2),
        Column("residual", "mean_residual", None),
        Column("iterations", "mean_iterations", 1),
        Column("converged %", "fraction_converged", 1, 100),
        Column("contracts %", "contraction/after/fraction_holding", 0, 100),
        Column("parameters", "parameters", 0),
        Column("KB", "size_kb", 1),
        Column("peak MiB", "peak_memory_mib", 0),
    )


def mean_and_sd(values: list[float], digits: int | None, *, joint: str = " ± ") -> str:
    """Return the mean and, where the values differ, standard deviation (n - 1); "-" for none.

    A number too large for fixed digits is written as 4.1e+34.

    >>> mean_and_sd([1.0, 3.0], 1), mean_and_sd([2.0, 2.0], 1), mean_and_sd([], 1)
    ('2.0 ± 1.4', '2.0', '-')
    >>> mean_and_sd([3.2e-4, 4.4e-4], None)
    '0.00038 ± 8.5e-05'
    """
    if not values:
        return "-"
    mean = _number(statistics.fmean(values), digits)
    if len(set(values)) < 2:
        return mean
    return f"{mean}{joint}{_number(statistics.stdev(values), digits)}"


def _number(value: float, digits: int | None) -> str:
    return f"{value:.2g}" if digits is None or abs(value) >= 1e9 else f"{value:.{digits}f}"


def groups(records: list[Record]) -> list[list[Record]]:
    """Return records that differ in nothing but the seed, together."""
    found: dict[str, list[Record]] = {}
    for record in records:
        # By the recipe: the period that it chose may differ from seed to seed.
        settings = record["recipe"] if "recipe" in record else record["run"]
        key = json.dumps({n: v for n, v in settings.items() if n != "seed"}, sort_keys=True)
        found.setdefault(key, []).append(record)
    return list(found.values())


def by_dataset(records: list[Record]) -> dict[str, list[Record]]:
    """Return the records of each data set and metric, in the order of the first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["run"]["dataset"], []).append(record)
    return found
