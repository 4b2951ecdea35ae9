"""The numbers of the paper, which `fixpoint reproduce` prints next to ours."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Row(NamedTuple):
    """A row of a table of the paper, and the recipe that stands for it.

    recipe: its name.
    dataset, algorithm: as printed in the paper.
    value: test accuracy in percent, or perplexity on PTB; the best over epochs.
    size_kb: model size in KB; words' vectors are not counted.
    hours: training time as printed there, in hours. Rows were timed on different machines.
    """

    recipe: str
    dataset: str
    algorithm: str
    value: float
    size_kb: float
    hours: float | None


_MODELS = {
    "FastRNN": "fastrnn",
    "FastGRNN-LSQ": "fastgrnn",
    "RNN": "rnn",
    "SpectralRNN": "spectralrnn",
    "EURNN": "eurnn",
    "LSTM": "lstm",
    "GRU": "gru",
    "UGRNN": "ugrnn",
    "ERNN": "ernn",
    "ERNN(K=1)": "ernn",
    "ERNN(K=2)": "ernn-k2",
}

_TABLE_2 = """
HAR-2: FastRNN 94.50 29 0.063, FastGRNN-LSQ 95.38 29 0.081, RNN 91.31 29 0.114,
  SpectralRNN 95.48 525 0.730, EURNN 93.11 12 0.740, LSTM 93.65 74 0.183, GRU 93.62 71 0.130,
  UGRNN 94.53 37 0.120, ERNN 95.59 34 0.061
DSA-19: FastRNN 84.14 97 0.032, FastGRNN-LSQ 85.00 208 0.036, RNN 71.68 20 0.019,
  SpectralRNN 80.37 50 0.038, LSTM 84.84 526 0.043, GRU 84.84 270 0.039, UGRNN 84.74 399 0.039,
  ERNN 86.87 36 0.015
Google-12: FastRNN 92.21 56 0.61, FastGRNN-LSQ 93.18 57 0.63, RNN 73.25 56 1.11,
  SpectralRNN 91.59 228 19.0, EURNN 76.79 210 120, LSTM 92.30 212 1.36, GRU 93.15 248 1.23,
  UGRNN 92.63 75 0.78, ERNN 94.96 66 0.20
Google-30: FastRNN 91.60 96 1.30, FastGRNN-LSQ 92.03 45 1.41, RNN 80.05 63 2.13,
  SpectralRNN 88.73 128 11.0, EURNN 56.35 135 19.0, LSTM 90.31 219 2.63, GRU 91.41 257 2.70,
  UGRNN 90.54 260 2.11, ERNN 94.10 70 0.44
Pixel-MNIST: FastRNN 96.44 166 15.10, FastGRNN-LSQ 98.72 71 12.57, EURNN 95.38 64 122,
  RNN 94.10 71 45.56, LSTM 97.81 265 26.57, GRU 98.70 123 23.67, UGRNN 97.29 84 15.17,
  ERNN 98.13 80 2.17
Yelp-5: FastRNN 55.38 130 3.61, FastGRNN-LSQ 59.51 130 3.91, RNN 47.59 130 3.33,
  SpectralRNN 56.56 89 4.92, EURNN 59.01 122 72, LSTM 59.49 516 8.61, GRU 59.02 388 8.12,
  UGRNN 58.67 258 4.34, ERNN 57.21 138 0.69
"""
# Training times in minutes in the paper.
_TABLE_3 = """
PTB: FastRNN 127.76 513 11.20, FastGRNN-LSQ 115.92 513 12.53, RNN 144.71 129 9.11,
  SpectralRNN 130.20 242 -, LSTM 117.41 2052 13.52, UGRNN 119.71 256 11.12, ERNN 119.71 529 7.11
"""
_TABLE_4 = """
HAR-2: FastRNN 94.50 29 0.063, FastGRNN-LSQ 95.38 29 0.081, RNN 91.31 29 0.114,
  LSTM 93.65 74 0.183, ERNN(K=1) 95.59 34 0.061, ERNN(K=2) 96.33 35 0.083
"""


def _rows(text: str, unit: float) -> tuple[Row, ...]:
    rows = []
    for block in " ".join(text.split("\n  ")).strip().splitlines():
        dataset, _, cells = block.partition(":")
        for cell in cells.split(","):
            algorithm, value, size, time = cell.split()
            data = (
                dataset.lower() if dataset.startswith("Pixel") else dataset.lower().replace("-", "")
            )
            hours = None if time == "-" else float(time) / unit
            recipe = f"{data}-{_MODELS[algorithm]}"
            rows.append(Row(recipe, dataset, algorithm, float(value), float(size), hours))
    return tuple(rows)


TABLES = {
    "table2": _rows(_TABLE_2, 1),
    "table3": _rows(_TABLE_3, 60),
    "table4": _rows(_TABLE_4, 1),
}
"""The tables of results of the paper.

Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network, Tables 2-4.
"""


class Shape:
    """Sequences of T steps of d features (none: words) in this many classes (none: a text).

    It stands for a data set where a model is only built, as for its size.
    """

    vocabulary = ("word",) * 20

    def __init__(self, T: int, d: int | None, classes: int) -> None:
        self.name = "shape"
        self.classes = tuple(str(i) for i in range(classes))
        self.kind = "language-model" if not classes else "classification" if d else "tokens"
        self.x_train = torch.zeros(1, T, d) if d else torch.zeros(1, T)


SHAPES = {
    "HAR-2": Shape(128, 9, 2),
    "DSA-19": Shape(125, 45, 19),
    "Google-12": Shape(99, 32, 12),
    "Google-30": Shape(99, 32, 30),
    "Pixel-MNIST": Shape(784, 1, 10),
    "Yelp-5": Shape(300, None, 5),
    "PTB": Shape(300, None, 0),
}
"""Those of the data sets in the tables.

Source: the same, Table 1.
"""
