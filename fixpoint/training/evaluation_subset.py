"""The windows at which a trained model is examined, and its score on them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fixpoint._messages import percent
from fixpoint.analysis import evenly_spaced
from fixpoint.data import stream_batches
from fixpoint.training.loading import Trained


class Subset(NamedTuple):
    """Some windows of a data set, finite and of one length.

    features: what the recurrent layer gets, (B, T, d).
    y: class of each window, or the word that comes next, (B,).
    has_classes: whether y are classes.
    sentences: which windows they are, and how well the model does.
    """

    features: Tensor
    y: Tensor
    has_classes: bool
    sentences: tuple[str, ...]


@torch.no_grad()
def subset(trained: Trained, part: str, count: int) -> Subset:
    """Take at most `count` windows of train, valid or test, spread evenly.

    Windows that hold NaN or inf count for the score alone. Texts of different lengths are cut
    where a tenth of them is longer; of one long text the first piece of each stream is taken.

    Raises:
        ValueError: the data have no such part, or no window of it is finite.
    """
    data = trained.data
    if part not in data.parts:
        raise ValueError(
            f"{data.name}, as this model was trained on it, has the parts "
            f"{', '.join(data.parts)}; got {part!r}"
        )
    return (_of_text if data.kind == "language-model" else _of_windows)(trained, part, count)


def _of_windows(trained: Trained, part: str, count: int) -> Subset:
    data, model = trained.data, trained.model
    x, y, lengths = (getattr(data, f"{name}_{part}") for name in ("x", "y", "lengths"))
    total, rows = len(x), evenly_spaced(len(x), count)
    x, y = data.inputs(x[rows]), y[rows]
    ends = [] if lengths is None else [lengths[rows]]
    x = x.to(trained.dtype) if x.is_floating_point() else x
    some = zip(*(tensor.split(256) for tensor in (x, *ends)), strict=True)
    logits = torch.cat([model(*batch) for batch in some])
    right = logits.isfinite().all(1) & (logits.argmax(1) == y)
    which = f"{len(rows)} of {total}" if len(rows) < total else f"All {total}"
    which += f" {part} windows"
    sentences = [
        f"{which}: accuracy {percent(_mean(right), 1)}; {_by_class(right, y, data.classes)}."
    ]
    keep = x.isfinite().flatten(1).all(1)
    if lengths is not None:
        T = int(ends[0].double().quantile(0.9, interpolation="lower"))
        keep, x = ends[0] >= T, x[:, :T]
        sentences.append(
            f"Below are the first {T} words of the {int(keep.sum())} texts that have as many."
        )
    elif not bool(keep.all()):
        sentences.append(f"{int((~keep).sum())} of them hold NaN or inf and are left out below.")
    if not bool(keep.any()):
        raise ValueError(f"no {part} window of {data.name} is finite, so there is nothing to see")
    return Subset(model.features(x[keep]), y[keep], True, tuple(sentences))


def _of_text(trained: Trained, part: str, count: int) -> Subset:
    data, training = trained.data, trained.recipe.training
    x, y = (getattr(data, f"{name}_{part}") for name in ("x", "y"))
    pieces = stream_batches(x, y, batch_size=training.batch_size, steps=training.bptt)
    words, following = (tensor[:count] for tensor in next(pieces))
    logits, _ = trained.model(data.inputs(words))
    loss = F.cross_entropy(logits.flatten(0, 1), following.flatten()).item()
    sentence = (
        f"The first {words.shape[1]} words of {len(words)} pieces of {part}: perplexity "
        f"{math.exp(loss) if loss < 700 else math.inf:.1f}."
    )
    features = trained.model.features(data.inputs(words))
    return Subset(features, following[:, -1], False, (sentence,))


def _by_class(right: Tensor, y: Tensor, classes: tuple[str, ...]) -> str:
    """Return the fraction of each class, or of the worst three of many."""
    fractions = {c: _mean(right[y == c]) for c in y.unique().tolist()}
    worst = sorted(fractions, key=lambda c: fractions[c])
    few = len(worst) <= 6
    named = sorted(worst) if few else worst[:3]
    listed = ", ".join(f"{classes[c]} {percent(fractions[c], 1)}" for c in named)
    return f"{'by class' if few else 'worst of the classes'}: {listed}"


def _mean(right: Tensor) -> float:
    return right.double().mean().item()
