"""Tables on the terminal that fit its width and never cut a number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fixpoint._messages import printable
from fixpoint.training.recipe.names import MODELS, short_name
from fixpoint.training.results.aggregate import columns, groups
from fixpoint.training.results.description import descriptions
from fixpoint.training.results.store import Record
from fixpoint.training.results.verdict import divergence, row_names

NARROWEST = 20
"""Columns of the terminal that names are wrapped to before a number is left out."""


class FittingTable(NamedTuple):
    """Names on the left and numbers on the right, as many as the terminal has room for.

    title, caption: above and below.
    names: heads of the columns of names, which may be wrapped.
    heads: heads of the columns of numbers, the most important first.
    rows: names and numbers of each row; both may have several lines.
    notes: a head and a text for each row, as the last column, which may be wrapped.
    """

    title: str
    names: Sequence[str]
    heads: Sequence[str]
    rows: Sequence[tuple[Sequence[str], Sequence[str]]]
    caption: str = ""
    notes: tuple[str, Sequence[str]] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._fitting(options.max_width)
        yield Text(printable(self.title), style="italic")
        if not shown:
            yield from self._lines()
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.padding = (0, 0, 0, 1)
        for head in self.names:
            table.add_column(Text(head), overflow="fold")
        for head in self.heads[:shown]:
            table.add_column(Text(head), justify="right", no_wrap=True, min_width=1)
        if self.notes:
            table.add_column(Text(self.notes[0]), overflow="fold")
        for i, (names, numbers) in enumerate(self.rows):
            cells = (*names, *numbers[:shown], *([self.notes[1][i]] if self.notes else []))
            table.add_row(*(Text(printable(cell)) for cell in cells))
        left_out = [head.replace("\n", " ") for head in self.heads[shown:]]
        yield table
        if self.caption:
            yield Text(printable(self.caption))
        if left_out:
            yield Text(f"Not shown, the terminal is too narrow: {', '.join(left_out)}.")

    def _fitting(self, width: int) -> int:
        """Count how many columns of numbers fit next to the names."""
        wrapped = [
            [head, *(names[i] for names, _ in self.rows)] for i, head in enumerate(self.names)
        ]
        wrapped += [[self.notes[0], *self.notes[1]]] if self.notes else []
        free = width - sum(min(NARROWEST, _width(cells)) + 2 for cells in wrapped)
        for i, head in enumerate(self.heads):
            free -= 2 + _width([head, *(numbers[i] for _, numbers in self.rows)])
            if free < 0:
                return i
        return len(self.heads)

    def _lines(self) -> Iterable[Text]:
        """Return each row as a sentence, where no column fits."""
        for i, (names, numbers) in enumerate(self.rows):
            pairs = zip(self.heads, numbers, strict=True)
            cells = [f"{head} {number}".replace("\n", " ") for head, number in pairs]
            cells += [f"{self.notes[0]} {self.notes[1][i]}"] if self.notes else []
            yield Text(printable(f"{' '.join(names)}: {', '.join(cells)}".replace("\n", " ")))


def comparison_table(records: list[Record]) -> FittingTable:
    """Return rows in the order of the records, all of one data set; several seeds of one
    configuration
    share a row."""
    found = groups(records)
    names = row_names(found)
    all_columns = [c for c in columns(records[0]["metric"]) if c.values(records)]
    rows = []
    for name, group in zip(names, found, strict=True):
        lines = [name]
        lost = sum(divergence(record) is not None for record in group)
        if lost:
            lines.append(f"{lost} of {len(group)} diverged" if len(group) > 1 else "diverged")
        rows.append((["\n".join(lines)], [c.text(group, joint="\n± ") for c in all_columns]))
    heads = [column.head.replace(" ", "\n", 1) for column in all_columns]
    return FittingTable(_title(records), ["model"], heads, rows, _caption(names, found))


def _title(records: list[Record]) -> str:
    run = records[0]["run"]
    seeds = sorted({r["run"]["seed"] for r in records})
    threads = records[0]["threads"]
    seed = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds, mean ± s.d."
    alike = [
        f"{run[name]} {unit}"
        for name, unit in (("hidden", "hidden units"), ("epochs", "epochs"))
        if all(r["run"][name] == run[name] for r in records)
    ]
    models = {MODELS.get(str(r["run"]["model"]), short_name(r["run"]["model"])) for r in records}
    on = f"{models.pop()} on " if len(models) == 1 else ""
    return (
        f"{on}{', '.join([run['dataset'], *alike, seed])}; "
        f"{threads} thread{'s' * (threads != 1)} each, torch {records[0]['versions']['torch']}"
    )


def _caption(names: list[str], found: list[list[Record]]) -> str:
    """Return what each ERNN is, and that solvers of several maps are compared, where they are."""
    runs = [group[0]["run"] for group in found]
    lines = [f"{name}: {text}." for name, text in descriptions(zip(names, runs, strict=True))]
    caution = confounded([(run["solver"], run["map"]) for run in runs if run["map"]])
    one = any(len(record["epochs"]) == 1 for group in found for record in group)
    lines.append(
        "s / epoch: of one epoch, which may compile."
        if one
        else "s / epoch: median of the epochs after the first, which may compile."
    )
    return "\n".join([*lines, *([caution] if caution else [])])


def confounded(pairs: Iterable[tuple[str, str]]) -> str:
    """Caution where rows differ in solver and map at once; "" where each pair is there."""
    pairs = set(pairs)
    solvers, maps = ({pair[i] for pair in pairs} for i in (0, 1))
    if len(solvers) < 2 or len(maps) < 2 or len(pairs) == len(solvers) * len(maps):
        return ""
    return (
        "Rows of different maps are different models: a difference between them is not that of "
        "their solvers. Compare solvers on one map, e.g. --map self-feedback."
    )


def _width(cells: Iterable[str]) -> int:
    return max(len(line) for cell in cells for line in printable(cell).split("\n"))
