"""A confusion matrix as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure


def confusion_figure(matrix: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """Draw how many windows of each class (row) were given each class (column).

    Shades are fractions of a row, so that rare classes are seen too.

    Args:
        matrix: windows, (C, C).
        classes: name of each class.

    Example:
        >>> from fixpoint.analysis.plots import confusion_figure
        >>> len(confusion_figure([[9, 1], [2, 8]], ["sit", "walk"]).axes)
        1
    """
    size = max(3.0, 0.5 * len(classes) + 2.0)
    figure = Figure(figsize=(size, size))
    axes = figure.add_subplot()
    fractions = [[count / max(sum(row), 1) for count in row] for row in matrix]
    axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(classes))
    # A character is some 0.09 inch wide, and the axes are 2.3 inch wide or more.
    crowded = len(classes) > 3 or len(classes) * max(map(len, classes), default=0) > 24
    axes.set_xticks(ticks, classes, rotation=90 if crowded else 0)
    axes.set_yticks(ticks, classes)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    for i, row in enumerate(matrix):
        for j, count in enumerate(row):
            dark = fractions[i][j] > 0.5
            axes.text(j, i, str(count), ha="center", va="center", color="w" if dark else "k")
    return figure
