"""One CSV file of a user: separator, decimal mark, byte order mark and header are recognized."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fixpoint.data.text_file import decode

SEPARATORS = ("\t", ";", "|", ",", None)
"""In order of precedence; None is white space."""

_NAMES = {"\t": "tabs", None: "white space"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf(inity)?)", re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d+")
_FRACTION = re.compile(r"[+-]0|[+-]?0\d+")  # not of a whole number: the part beside a decimal comma
_SEPARATOR_LINE = re.compile(r'\s*"?sep=(.)"?\s*', re.IGNORECASE)  # line 1 of Excel
_COMMENT = "#"  # begins a line of numpy.savetxt that holds no numbers
_INDEX = ("", "Unnamed: 0")  # the header of an index column written by pandas


class CsvTable(NamedTuple):
    """The content of a CSV file.

    Attributes:
        values: (T, d) float64.
        names: of the columns, from the header; empty where there is none or it does not name each.
        counting_header: whether the first line may be the header 0, 1, ..., d - 1 that pandas
            writes for columns without names; the line is part of `values`.
        note: what a user should verify, or an empty string.
    """

    values: np.ndarray
    counting_header: bool = False
    note: str = ""
    names: tuple[str, ...] = ()

    def ordered(self, names: Sequence[str], name: str, source: str) -> np.ndarray:
        """Return the values, (T, d), in the order of these names of columns.

        They are left as they are where no names are given or the table has no header.

        Args:
            names: of d columns.
            name: of the file in messages.
            source: what has these names, in messages.

        Raises:
            ValueError: the columns of the table have other names.
        """
        if not names or not self.names or tuple(names) == self.names:
            return self.values
        if sorted(names) != sorted(self.names):
            raise ValueError(
                f"{name} has the columns {', '.join(self.names)}, but {source} "
                f"{', '.join(names)}: rename its columns, or leave out its header to take them by "
                "position"
            )
        return self.values[:, [self.names.index(key) for key in names]]


def parse_csv(data: bytes, name: str) -> CsvTable:
    """Return the numbers of a CSV file.

    Columns are separated by tabs, semicolons, vertical bars, commas or white space. A comma is the
    decimal mark where another character separates the columns, and inside quotes. A first line
    without a number is a header, an index column written by pandas is left out, and so are lines
    that begin with #.

    Args:
        data: the file, see `decode`.
        name: name of the file in messages.

    Raises:
        ValueError: in one line: the file is empty, a cell is not a finite number, or two lines
            differ in their number of columns.

    >>> parse_csv(b"left;right\\n1,5;2\\n3;4\\n", "a.csv").values
    array([[1.5, 2. ],
           [3. , 4. ]])
    """
    lines = _lines(data, name)
    separator = _separator(lines)
    raw = {
        n: _cells(line, separator, f"{name}, line {n}")
        for n, line in lines.items()
        if not _SEPARATOR_LINE.fullmatch(line)
    }
    if raw and all(cells[-1] == "" for cells in raw.values()):
        raw = {n: cells[:-1] for n, cells in raw.items()}  # each line ends with a separator
    rows = {n: [_with_point(cell) for cell in cells] for n, cells in raw.items()}
    header = rows.pop(min(rows)) if rows and _is_header(rows[min(rows)]) else []
    if not rows:
        raise ValueError(f"{name} is empty: lines of numbers are needed")
    values = _values(rows, name, separator)
    _check_decimal_mark([raw[n] for n in rows], name, separator, len(header))
    if header and header[0] in _INDEX and np.array_equal(values[:, 0], np.arange(len(values))):
        names = _names_of(header[1:], values.shape[1] - 1)
        return CsvTable(values[:, 1:], note="an index column was left out", names=names)
    counting = not header and _may_be_header(values)
    names = _names_of(header, values.shape[1])
    return CsvTable(values, counting, _doubt(rows, separator), names)


def parse_columns(data: bytes, name: str, names: Sequence[str] = ()) -> dict[str, list[str]]:
    r"""Return the columns of a CSV file with a header, as text: numbers have decimal points.

    Args:
        names: of the columns where a file of as many columns has no header.

    Raises:
        ValueError: it is empty, has no header, a column with cells has no name there, or a line has
            another number of cells. The first column may lack a name, as an index of pandas does.

    >>> parse_columns(b"t;ax;activity\n0;1,5;walk\n1;2;sit\n", "a.csv")["ax"]
    ['1.5', '2']
    """
    lines = _lines(data, name)
    separator = _separator(lines)
    rows = [
        (n, [_with_point(cell) for cell in _cells(line, separator, f"{name}, line {n}")])
        for n, line in lines.items()
        if not _SEPARATOR_LINE.fullmatch(line)
    ]
    header = rows[0][1] if rows else []
    if header and all(map(_is_number, header)) and len(header) == len(names):
        header = list(names)
        rows = [(0, header), *rows]
    if len(rows) < 2:
        what = "has one line alone" if rows else "is empty"
        raise ValueError(f"{name} {what}: a header and a line for each sample are needed")
    twice = next((key for key in header if key and header.count(key) > 1), None)
    if twice is not None and not any(map(_is_number, header)):
        raise ValueError(f"{name} has two columns with the name {twice!r}: rename one of them")
    if any(map(_is_number, header)):
        raise ValueError(
            f"{name} has no header: line 1 must name each column, as time,ax,ay,az,activity"
            + (f", or each line hold {len(names)} numbers, {', '.join(names)}" if names else "")
        )
    for n, cells in rows[1:]:
        if len(cells) != len(header):
            raise ValueError(f"{name}, line {n} has {len(cells)} columns, the header {len(header)}")
    columns = [(i, key, [cells[i] for _, cells in rows[1:]]) for i, key in enumerate(header)]
    unnamed = [i + 1 for i, key, cells in columns if i and not key and any(cells)]
    if unnamed:
        raise ValueError(unnamed_column(name, unnamed[0]))
    return {key: cells for _, key, cells in columns if key or any(cells)}


def unnamed_column(name: str, place: int) -> str:
    """Say that a column is not named; `place` counts from 1."""
    return f"{name}: column {place} has no name in the header: name it, or remove the column"


def _lines(data: bytes, name: str) -> dict[int, str]:
    """Return the lines that are neither blank nor comments, by their numbers from 1."""
    lines = re.split(r"\r\n|\r|\n", decode(data, name))
    kept = {n: line for n, line in enumerate(lines, 1) if line.strip(" \t;,|")}
    return {n: line for n, line in kept.items() if not line.lstrip().startswith(_COMMENT)}


def _separator(lines: dict[int, str]) -> str | None:
    """Return the first separator that splits the last line that it can into numbers.

    If none does, the first that is found in the last line.
    """
    if not lines:
        return ","
    if match := _SEPARATOR_LINE.fullmatch(lines[min(lines)]):
        return match.group(1)
    for n in reversed(lines):
        for separator in _separators_in(lines[n]):
            cells = [_with_point(cell) for cell in _cells(lines[n], separator, f"line {n}")]
            if any(cells) and all(_is_number(cell) or cell == "" for cell in cells):
                return separator
    return _separators_in(lines[max(lines)])[0]


def _separators_in(line: str) -> list[str | None]:
    return [separator for separator in SEPARATORS if separator is None or separator in line]


def _cells(line: str, separator: str | None, where: str) -> list[str]:
    """Return the cells of a line, without quotes."""
    if separator is None:
        return [cell.strip('"') for cell in line.split()]
    try:
        (cells,) = csv.reader([line], delimiter=separator)
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{where} cannot be read ({error})") from None
    return [cell.strip() for cell in cells]


def _with_point(cell: str) -> str:
    """Return a number with a decimal comma with a point instead; any other cell unchanged."""
    changed = cell.replace(",", ".")
    return changed if cell.count(",") == 1 and _is_number(changed) else cell


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell) is not None


def _is_header(cells: list[str]) -> bool:
    """Tell whether no cell is a number, or the cells are what pandas writes above an index."""
    if cells[0] == "" and cells[1:] == [str(i) for i in range(len(cells) - 1)]:
        return True
    return not any(map(_is_number, cells)) and any(map(str.isalpha, "".join(cells)))


def _names_of(header: list[str], columns: int) -> tuple[str, ...]:
    """Return the names in a header where it tells all columns apart, else none."""
    whole = len(header) == len(set(header)) == columns and all(header)
    return tuple(header) if whole and not any(map(_is_number, header)) else ()


def _values(rows: dict[int, list[str]], name: str, separator: str | None) -> np.ndarray:
    try:
        if any("_" in cell for cells in rows.values() for cell in cells):
            raise ValueError("Python's underscores in numbers")
        values = np.array(list(rows.values()), dtype=np.float64)
    except ValueError:
        raise ValueError(
            f"{name} is not a valid numeric table: {_first_problem(rows)}; columns were separated "
            f"by {_NAMES.get(separator, repr(separator))}: each line needs the same number of "
            "columns, separated by commas, semicolons or tabs"
        ) from None
    bad = ~np.isfinite(values).all(1)
    if bad.any():
        line = list(rows)[int(bad.argmax())]
        raise ValueError(f"{name} holds NaN or inf in {bad.sum()} lines, first in line {line}")
    return values


def _first_problem(rows: dict[int, list[str]]) -> str:
    first = min(rows)
    for n, cells in rows.items():
        if len(cells) != len(rows[first]):
            return (
                f"the number of columns changed from {len(rows[first])} in line {first} to "
                f"{len(cells)} in line {n}"
            )
        for column, cell in enumerate(cells, 1):
            if not _is_number(cell):
                what = f"could not convert {cell[:40]!r}" if cell else "no number"
                return f"{what} in line {n}, column {column}"
    return "numbers of unknown form"


def _check_decimal_mark(
    rows: list[list[str]], name: str, separator: str | None, columns: int
) -> None:
    """Raise where commas may be decimal marks, thousands separators or column separators."""
    points = any("." in cell for row in rows for cell in row)
    commas = any("," in cell for row in rows for cell in row)
    remedy = "write decimal points, or separate the columns by semicolons"
    if points and commas:
        raise ValueError(f"{name} has both decimal points and decimal commas: {remedy}")
    if separator != "," or commas:
        return
    if columns and len(rows[0]) == 2 * columns:
        raise ValueError(
            f"{name} has {columns} names in its header and {len(rows[0])} numbers a line: {remedy}"
        )
    if not points and any(_FRACTION.fullmatch(cell) for row in rows for cell in row):
        raise ValueError(
            f"{name} has commas both as decimal marks and between columns, it seems: {remedy}"
        )


def _may_be_header(values: np.ndarray) -> bool:
    """Tell whether line 1 is 0, 1, ..., d - 1 with d > 1, and line 2 does not count on."""
    first = np.arange(values.shape[1])
    return bool(
        len(values) > 1
        and len(first) > 1
        and np.array_equal(values[0], first)
        and not np.array_equal(values[1], first + 1)
    )


def _doubt(rows: dict[int, list[str]], separator: str | None) -> str:
    """Return a note where each line might be one number with a decimal comma."""
    if separator == "," and all(
        len(row) == 2 and _WHOLE.fullmatch(row[0]) and row[1].isdigit() for row in rows.values()
    ):
        first = ",".join(rows[min(rows)])
        return f"{first} was read as two numbers, not as one with a decimal comma"
    return ""
