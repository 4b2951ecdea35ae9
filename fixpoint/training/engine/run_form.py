"""The form of the inputs of a run, kept with its weights so that it works without its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fixpoint.data import Dataset, Kind, Normalization
from fixpoint.training.engine.checkpoint import replace_file

FORM = "inputs.json"
"""File of the form in the folder of a run."""


class InputForm(NamedTuple):
    """Shape, units and classes of the windows that a model takes.

    name: of the data set.
    kind: see `Dataset`; all but "classification" have a name alone here.
    timesteps, size: T and d of a window.
    lengths: whether windows may be shorter than T.
    channels: name of each channel, or empty.
    classes: name of each class.
    normalization: of values in the units of the sensor.
    """

    name: str
    kind: Kind = "classification"
    timesteps: int = 0
    size: int = 0
    lengths: bool = False
    channels: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    normalization: Normalization = Normalization(torch.zeros(0), torch.ones(0))

    @classmethod
    def of(cls, data: Dataset, normalization: Normalization | None) -> InputForm:
        """Return the form of the windows of a data set, with the normalization found on it."""
        if data.kind != "classification" or normalization is None:
            return cls(data.name, data.kind)
        return cls(
            data.name,
            data.kind,
            data.x_train.shape[1],
            data.x_train.shape[2],
            data.lengths_train is not None,
            data.channels,
            data.classes,
            normalization,
        )

    def blank(self) -> Dataset:
        """Return a data set of this form without a window, for which a model can be built."""
        parts = ("train", "test")
        empty: dict[str, Any] = {
            f"x_{part}": torch.zeros(0, self.timesteps, self.size) for part in parts
        }
        names = ("y", "lengths") if self.lengths else ("y",)
        for name in names:
            empty |= {f"{name}_{part}": torch.zeros(0, dtype=torch.int64) for part in parts}
        return Dataset(
            name=self.name,
            classes=self.classes,
            channels=self.channels,
            license="your own data",
            citation="your own data",
            **empty,
        )

    def save(self, folder: Path) -> None:
        """Write the form into the folder of a run; that of words has no file."""
        if self.kind != "classification":
            return
        n = self.normalization
        content = self._asdict() | {
            "normalization": {
                "center": n.center.tolist(),
                "spread": n.spread.tolist(),
                "asinh": n.asinh,
                "constant": n.constant,
            }
        }
        replace_file(folder / FORM, json.dumps(content).encode())

    @classmethod
    def load(cls, folder: Path) -> InputForm | None:
        """Read the form of a run; None where an earlier version left none.

        Raises:
            ValueError: the file is damaged.
        """
        path = folder / FORM
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = content.pop("normalization")
            for name in ("center", "spread"):
                found[name] = torch.tensor(found[name], dtype=torch.float64)
            for name in ("channels", "classes"):
                content[name] = tuple(content[name])
            return cls(**content, normalization=Normalization(**found))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove it, and give the data by --data PATH"
            ) from None
