"""Finished runs as a table for a paper (LaTeX), and one line a run for other programs (CSV)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from fixpoint.training.engine.checkpoint import replace_file
from fixpoint.training.recipe.names import run_label
from fixpoint.training.results.aggregate import by_dataset, columns, groups
from fixpoint.training.results.confusion import MOST_CLASSES, by_class, total_confusion
from fixpoint.training.results.store import Record, read_records

_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


def write_table(sources: Sequence[Path], path: Path, form: Callable[[list[Record]], str]) -> Path:
    """Write the records of these folders in a form, `as_latex` or `as_csv`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, form(read_records(*sources)).encode())
    return path


def as_latex(records: list[Record]) -> str:
    r"""Return a table for each data set, mean and s.d. over seeds; needs the package booktabs.

    Example:
        >>> from fixpoint.training.results.export import latex_text
        >>> latex_text("50 % of a_b")
        '50 \\% of a\\_b'
    """
    return "\n".join(_latex(name, group) for name, group in by_dataset(records).items())


def _latex(dataset: str, records: list[Record]) -> str:
    shown = [c for c in columns(records[0]["metric"]) if c.values(records)]
    heads = ["model", "backward", "seeds", *(column.head for column in shown)]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{Results on {latex_text(dataset)}: mean and s.d. over seeds.}}",
        rf"\begin{{tabular}}{{ll{'r' * (len(heads) - 2)}}}",
        r"\toprule",
        " & ".join(map(latex_text, heads)) + r" \\",
        r"\midrule",
    ]
    for group in groups(records):
        run = group[0]["run"]
        names = [run_label(run), run["backward"] or "-", str(len(group))]
        cells = [*names, *(column.text(group) for column in shown)]
        lines.append(" & ".join(map(latex_text, cells)) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
    for group in groups(records):
        lines += _latex_confusion(group)
    return "\n".join(lines)


def _latex_confusion(group: list[Record]) -> list[str]:
    """Return the confusion matrix of a row, with recall and F1 of each class."""
    matrix = total_confusion(group)
    if matrix is None or len(matrix) > MOST_CLASSES:
        return []
    classes, run = group[0]["classes"], group[0]["run"]
    rows = [
        [name, *map(str, row), *("-" if v is None else f"{v:.1f}" for v in scores)]
        for name, row, scores in zip(classes, matrix, by_class(matrix), strict=True)
    ]
    name = ", ".join([run_label(run), *([run["backward"]] if run["backward"] else [])])
    return [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(name)} on {latex_text(run['dataset'])}: test windows of each "
        r"class (row) by the predicted one, recall and F1.}",
        rf"\begin{{tabular}}{{l{'r' * (len(classes) + 2)}}}",
        r"\toprule",
        " & ".join(map(latex_text, ["true class", *classes, "recall %", "F1 %"])) + r" \\",
        r"\midrule",
        *(" & ".join(map(latex_text, row)) + r" \\" for row in rows),
        *(r"\bottomrule", r"\end{tabular}", r"\end{table}", ""),
    ]


def latex_text(text: str) -> str:
    """Return the text in which LaTeX reads no commands."""
    return "".join(_SPECIAL.get(c, c) for c in text if c.isprintable())


def as_csv(records: list[Record]) -> str:
    """Return one line a run: its settings, then its numbers."""
    settings = list(dict.fromkeys(name for record in records for name in record["run"]))
    metrics = dict.fromkeys(record["metric"] for record in records)
    shown = list(dict.fromkeys(column for metric in metrics for column in columns(metric)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["key", "label", *settings, *(column.head for column in shown)])
    for record in records:
        values = [record["run"].get(name) for name in settings]
        label = run_label(record["run"])
        writer.writerow([record["key"], label, *values, *(column.of(record) for column in shown)])
    return text.getvalue()
