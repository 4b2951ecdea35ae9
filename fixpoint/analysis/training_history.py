"""History of a training: the loss, the parameters, and other values to record."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fixpoint.analysis.hidden_states import hidden_states


class History(NamedTuple):
    """The course of a training over E epochs; index 0 is the untrained model.

    loss: mean training loss, (E + 1,): over the epoch, of the untrained model first.
    test_loss, accuracy: after each epoch, (E + 1,); accuracy in percent. None without test data.
    parameters: all parameters as one vector, (E + 1, P).
    watched: what `watch` returned, E + 1 values.
    """

    loss: Tensor
    test_loss: Tensor | None
    accuracy: Tensor | None
    parameters: Tensor
    watched: list[Any]


class ParameterDrift(NamedTuple):
    """Distances of the parameters over E epochs.

    to_last: distance of the model after each epoch from the last one, (E + 1,).
    change: distance that each epoch moved it, (E,).
    size: norm of the last parameters, to make either relative.
    """

    to_last: Tensor
    change: Tensor
    size: Tensor


def parameter_drift(parameters: Tensor) -> ParameterDrift:
    """Return Euclidean distances of the parameters of each epoch from the last and the one before.

    Args:
        parameters: one vector an epoch, (E + 1, P), as in `History`.

    Source: H1 of Zhang et al. (2019), figure "Validation of H1".

    Example:
        >>> import torch
        >>> from fixpoint.analysis import parameter_drift
        >>> drift = parameter_drift(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]]))
        >>> drift.to_last[1:].tolist(), drift.change.tolist()
        ([1.0, 0.0], [5.0, 1.0])
    """
    return ParameterDrift(
        (parameters - parameters[-1]).norm(dim=1),
        parameters.diff(dim=0).norm(dim=1),
        parameters[-1].norm(),
    )


def discrimination(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return intra-class over inter-class distance of the hidden states over time, (T,).

    The mean distance of two states of one class, averaged over the classes, divided by the mean
    distance of two states of different classes. 1: the states say nothing about the class;
    towards 0: each class has a place of its own.

    Args:
        model: recurrent layer, or a model that holds one as `layer`; see `hidden_states`.
        x: windows in the layer's layout. Costs N^2 distances a time step.
        y: class of each window, (N,).

    Returns:
        NaN at a time step where all states are equal.

    Raises:
        ValueError: fewer than two classes, or a class with one window.

    Source: H2 of Zhang et al. (2019), figure "Validation of H2"; the paper names the ratio but
        not the distances, here means over pairs.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import discrimination
        >>> y = torch.tensor([0, 1]).repeat(10)
        >>> x = (y - 0.5).expand(30, 20).unsqueeze(2) + 0.1 * torch.randn(30, 20, 1)
        >>> bool((discrimination(torch.nn.RNN(1, 4), x, y) < 0.5).all())
        True
    """
    return class_distance_ratio(hidden_states(model, x), y)


def class_distance_ratio(states: Tensor, y: Tensor) -> Tensor:
    """Return the ratio of `discrimination` for given states, (T, N, n)."""
    classes, counts = y.unique(return_counts=True)
    if len(counts) < 2 or int(counts.min()) < 2:
        raise ValueError(
            "discrimination needs two classes of two windows each; got classes of "
            f"{counts.tolist()} windows: give more data"
        )
    same = y[:, None] == y
    ratios = []
    for h in states.double():
        distance = torch.cdist(h, h, compute_mode="donot_use_mm_for_euclid_dist")
        # The zeros of the diagonal are not pairs.
        intra = [distance[y == c][:, y == c].sum() for c in classes]
        intra = torch.stack(intra) / (counts * (counts - 1))
        ratios.append(intra.mean() / distance[~same].mean())
    return torch.stack(ratios)
