"""A labelled set of sequences, or a stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fixpoint.data.images import as_image

Kind = Literal["classification", "tokens", "language-model"]
PARTS = ("train", "valid", "test")

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
_STORED: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "classification": (
        "float32 (N, T, d), or the same shape as float16, int16 or uint8",
        (torch.float32, torch.float16, torch.int16, torch.uint8),
    ),
    "tokens": ("integers (N, T)", _INTEGERS),
    "language-model": ("integers (N,)", _INTEGERS),
}
_AXES = {"classification": 3, "tokens": 2, "language-model": 1}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """Sequences with one class each, or a stream of tokens, split into train, valid and test.

    The kind "classification" has sequences of at most T vectors, "tokens" texts of at most T words,
    "language-model" one stream, in which each token is predicted from the previous ones. Large sets
    are stored as small as their file: `inputs` converts some rows to what a model takes.

    Args:
        name: name in `fixpoint.data.DATASETS`, or of the user's file.
        kind: see above.
        x_train, x_valid, x_test: sequences (N, T, d), float32, or float16, int16 or uint8 of large
            sets; "tokens": word ids (N, T), integers, 0 after the end; "language-model": the stream
            without its last token (N,).
        y_train, y_valid, y_test: class of each sequence (N,), int64, in `range(len(classes))`;
            "language-model": the next token (N,).
        classes: name of each class; "language-model": the vocabulary.
        lengths_train, lengths_valid, lengths_test: steps of each sequence or words of each text
            (N,), int64, where shorter ones are padded with zeros at their end; None: all have T.
        vocabulary: "tokens" and "language-model": the word of each id.
        groups_train, groups_valid, groups_test: who produced each sequence (N,), int64, e.g. the
            subject; None where unknown. Sequences of one group are not independent: split by
            group, not by sequence.
        scale, shift: a stored number times `scale` plus `shift` is the value; float32, each of a
            shape that broadcasts to (T, d). None: 1 and 0.
        asinh: `inputs` gives the inverse hyperbolic sine of these values; see `normalize`.
        channels: name of each channel; empty where they have none.
        vectors: "classification": triples of channels that are x, y and z of one vector in the
            frame of the sensor, as an acceleration is. Stored numbers may be turned by `rotate`.
        sensors: the sensor of each vector, 0, 1, ...; those of one sensor turn alike. Empty: all
            are of one.
        image: "classification": rows and columns of the image whose pixels, row by row, are the
            time steps, stored with a background of 0; None where they are none. It may be moved by
            `move`.
        subset: what is missing of the full data set; empty where it is complete.
        notes: what a user should know of how the data were read; shown by `repr`.
        license: terms of use.
        citation: what to cite.

    Valid is None where there is no official one: see `validation_split`.

    Raises:
        TypeError: sequences, classes, groups or lengths are not tensors.
        ValueError: shapes, dtypes or labels are inconsistent.

    >>> from fixpoint.data import load_dataset
    >>> load_dataset("har2-sample")
    Dataset(har2-sample (subset): 756 train + 324 test windows of 128 steps x 9 channels, 2 classes)
    """

    name: str
    kind: Kind = "classification"
    x_train: Tensor
    y_train: Tensor
    x_valid: Tensor | None = None
    y_valid: Tensor | None = None
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    lengths_train: Tensor | None = None
    lengths_valid: Tensor | None = None
    lengths_test: Tensor | None = None
    vocabulary: tuple[str, ...] = ()
    groups_train: Tensor | None = None
    groups_valid: Tensor | None = None
    groups_test: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    asinh: bool = False
    channels: tuple[str, ...] = ()
    vectors: tuple[tuple[int, int, int], ...] = ()
    sensors: tuple[int, ...] = ()
    image: tuple[int, int] | None = None
    subset: str = ""
    notes: tuple[str, ...] = ()
    license: str
    citation: str

    def __post_init__(self) -> None:
        if self.kind not in _AXES:
            raise ValueError(
                f"{self.name}: kind must be one of {', '.join(_AXES)}, got {self.kind!r}"
            )
        for part in self.parts:
            self._check(part)
        if self.channels and len(self.channels) != self.x_train.shape[-1]:
            raise ValueError(
                f"{self.name}: channels must name the {self.x_train.shape[-1]} channels, got "
                f"{len(self.channels)} names"
            )
        self._check_vectors()
        self._check_image()
        self._check_lengths()
        shapes = {part: tuple(getattr(self, f"x_{part}").shape[1:]) for part in self.parts}
        for part, shape in shapes.items():
            if shape != shapes["train"]:
                raise ValueError(
                    f"{self.name}: train and {part} windows must have one (T, d), "
                    f"got {shapes['train']} and {shape}"
                )

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are there, of train, valid and test."""
        return PARTS if self.x_valid is not None else ("train", "test")

    def inputs(self, x: Tensor) -> Tensor:
        """Return what a model takes, of some rows of `x_train`, `x_valid` or `x_test`.

        Returns:
            float32 values (B, T, d) in the units of the data, or normalized where `normalize` was
            called; int64 ids, of the shape of `x`, where the data are tokens.

        >>> from fixpoint.data import load_dataset
        >>> data = load_dataset("har2-sample")
        >>> data.inputs(data.x_train[:4]).shape
        torch.Size([4, 128, 9])
        """
        if self.kind != "classification":
            return x.long()
        x = x.float()
        if self.scale is not None:
            x = x * self.scale
        if self.shift is not None:
            x = x + self.shift
        return x.asinh() if self.asinh else x

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data with all tensors on a device.

        >>> from fixpoint.data import load_dataset
        >>> load_dataset("har2-sample").to("cpu").x_test.device
        device(type='cpu')
        """
        tensors: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)

    def _check(self, part: str) -> None:
        x = getattr(self, f"x_{part}")
        expected, dtypes = _STORED[self.kind]
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{self.name}: x_{part} must be a tensor, {expected}, got {type(x).__name__}"
            )
        if x.ndim != _AXES[self.kind] or x.dtype not in dtypes:
            raise ValueError(
                f"{self.name}: x_{part} must be {expected}, got {x.dtype} {tuple(x.shape)}"
            )
        for key in ("y", "groups", "lengths"):
            ids = getattr(self, f"{key}_{part}")
            if ids is None and key == "groups":
                continue
            if ids is None and (key == "y" or self.kind == "tokens"):
                raise ValueError(f"{self.name}: x_{part} needs {key}_{part} too, got None")
            if ids is not None and not isinstance(ids, Tensor):
                raise TypeError(
                    f"{self.name}: {key}_{part} must be a tensor, int64 ({len(x)},), one for each "
                    f"window, got {type(ids).__name__}: give torch.as_tensor({key}_{part})"
                )
            if ids is not None and (ids.shape != x.shape[:1] or ids.dtype != torch.int64):
                raise ValueError(
                    f"{self.name}: {key}_{part} must be int64 ({len(x)},), one for each window, "
                    f"got {ids.dtype} {tuple(ids.shape)}"
                )
        self._check_range(f"y_{part}", getattr(self, f"y_{part}"), len(self.classes), "classes")
        if self.kind != "classification":
            self._check_range(f"x_{part}", x, len(self.vocabulary), "words")

    def _check_range(self, key: str, ids: Tensor, count: int, of: str) -> None:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise ValueError(
                f"{self.name}: {key} must lie in 0..{count - 1} for {count} {of}, "
                f"got {int(ids.min())}..{int(ids.max())}"
            )

    def _check_lengths(self) -> None:
        given = [part for part in self.parts if getattr(self, f"lengths_{part}") is not None]
        if given and given != list(self.parts):
            raise ValueError(
                f"{self.name}: lengths are given of {', '.join(given)} only: give them of all parts"
            )
        least = 1 if self.kind == "classification" else 0
        for part in given:
            lengths, x = getattr(self, f"lengths_{part}"), getattr(self, f"x_{part}")
            steps = x.shape[1] if x.ndim > 1 else len(x)
            if len(lengths) and not least <= int(lengths.min()) <= int(lengths.max()) <= steps:
                raise ValueError(
                    f"{self.name}: lengths_{part} must lie in {least}..{steps}, got "
                    f"{int(lengths.min())}..{int(lengths.max())}"
                )

    def _check_vectors(self) -> None:
        channels = [channel for vector in self.vectors for channel in vector]
        size = self.x_train.shape[-1] if self.kind == "classification" else 0
        whole = all(len(vector) == 3 for vector in self.vectors)
        if not (whole and len({*channels} & {*range(size)}) == len(channels)):
            raise ValueError(
                f"{self.name}: vectors must be triples of different channels in 0..{size - 1}, "
                f"got {self.vectors}"
            )
        if self.sensors and (len(self.sensors) != len(self.vectors) or min(self.sensors) < 0):
            raise ValueError(
                f"{self.name}: sensors must be a number >= 0 for each of {len(self.vectors)} "
                f"vectors, got {self.sensors}"
            )

    def _check_image(self) -> None:
        if self.image is None:
            return
        shape = self.x_train.shape if self.kind == "classification" else ()
        try:
            object.__setattr__(self, "image", as_image(self.image, shape))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if self.lengths_train is not None:
            raise ValueError(f"{self.name}: an image has all pixels: leave out lengths or image")

    def __repr__(self) -> str:
        counts = " + ".join(f"{len(getattr(self, f'y_{part}'))} {part}" for part in self.parts)
        shape = self.x_train.shape
        if self.kind == "classification":
            steps = shape[1] if self.lengths_train is None else f"at most {shape[1]}"
            what = f"windows of {steps} steps x {shape[2]} channels, {len(self.classes)} classes"
        elif self.kind == "tokens":
            what = (
                f"texts of at most {shape[1]} of {len(self.vocabulary)} words, "
                f"{len(self.classes)} classes"
            )
        else:
            what = f"predictions of the next of {len(self.vocabulary)} words"
        subset = " (subset)" if self.subset else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"Dataset({self.name}{subset}: {counts} {what}{notes})"
