"""Freeze dropout masks, buffers and parametrized weights of a module during a solve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fixpoint.models.deq.variational_dropout import Masks, VariationalDropout

CHANGING = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""Modules of torch that draw a new mask at each call."""


@contextmanager
def frozen(
    module: nn.Module, function: Callable[..., Any] | None = None
) -> Iterator[Callable[..., Any]]:
    """For one solve, the module as a map that does not change from one evaluation to the next.

    Some modules change as they are evaluated in training mode, and an iteration would chase a
    moving target. In the map that this context gives

    - each `VariationalDropout` keeps one mask;
    - buffers that training changes start each evaluation from their values before the solve, and
      take those of the last evaluation, at z*, when the context ends: the running statistics of
      a batch normalization are updated once a solve, by what it sees at the equilibrium;
    - parametrized weights (`bound_spectral_norm`, torch's spectral_norm) are computed
      once, beforehand.

    Make a new context for each solve: masks, buffers and weights of a map are its own. The map
    may be evaluated after its context has ended, by a backward pass, with the same masks and
    without effect on the buffers. In evaluation mode only the weights need holding. A map held
    inside another held map (a `DEQ` in the map of a `DEQ`) joins it. After an error the buffers
    are as before.

    Batch normalization in training mode makes each row depend on its batch-mates, against the
    contract of phi: the solve and its gradient are then of the batch as a whole, so solve to a
    tolerance that all rows reach, and prefer a normalization of each sample, such as
    `torch.nn.LayerNorm`.

    Args:
        module: holds all that is to be held.
        function: the map, where it is not the module itself.

    Raises:
        ValueError: the module has a dropout of torch in training mode. A call of
            `torch.nn.functional.dropout` is not seen.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint
        >>> from fixpoint.models import VariationalDropout, bound_spectral_norm, frozen
        >>> linear = bound_spectral_norm(torch.nn.Linear(4, 4), bound=0.4)
        >>> model = torch.nn.Sequential(linear, VariationalDropout(0.5), torch.nn.Tanh())
        >>> x = torch.randn(3, 4)
        >>> with frozen(model) as phi:
        ...     solution = FixedPoint()(lambda z: phi(z) + x, torch.zeros(3, 4))
        >>> solution.converged.tolist()
        [True, True, True]
    """
    phi = _Held(module, module if function is None else function)
    yield phi
    phi.commit()


class _Held:
    """The map that `frozen` gives."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.function = function
        # A weight within a held map that is being evaluated is held already.
        self.weights = {
            part: part()
            for part in module.modules()
            if isinstance(part, parametrize.ParametrizationList) and "forward" not in vars(part)
        }
        training = [part for part in module.modules() if part.training]
        _refuse_changing(training)
        self.dropouts = [part for part in training if isinstance(part, VariationalDropout)]
        self.masks: Masks = {}
        self.buffers = {
            (part, name): buffer
            for part in training
            for name, buffer in part.named_buffers(recurse=False)
        }
        self.start = {key: buffer.detach().clone() for key, buffer in self.buffers.items()}
        self.last: dict[tuple[nn.Module, str], Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = [part.masks for part in self.dropouts]
        # Fresh copies: what one evaluation saved for its backward pass the next may not write to.
        copies = {key: buffer.clone() for key, buffer in self.start.items()}
        before = {(part, name): getattr(part, name) for part, name in copies}
        try:
            for part in self.dropouts:
                part.masks = self.masks if part.masks is None else part.masks
            for weight in self.weights:
                vars(weight)["forward"] = lambda weight=weight: self._weight(weight)
            _set(copies)
            result = self.function(*args, **kwargs)
            self.last = {(part, name): getattr(part, name) for part, name in copies}
            return result
        finally:
            _set(before)
            for weight in self.weights:
                del vars(weight)["forward"]
            for part, masks in zip(self.dropouts, outer, strict=True):
                part.masks = masks

    def _weight(self, part: parametrize.ParametrizationList) -> Tensor:
        weight = self.weights[part]
        return weight if torch.is_grad_enabled() else weight.detach()

    def commit(self) -> None:
        """Give the buffers their values after the last evaluation."""
        for key, value in self.last.items():
            # In place: others, such as a distributed wrapper, hold the same tensors.
            self.buffers[key].copy_(value)


def _refuse_changing(parts: list[nn.Module]) -> None:
    for part in parts:
        if isinstance(part, CHANGING) and part.p > 0:
            raise ValueError(
                f"{type(part).__name__}(p={part.p:g}) draws a new mask at each evaluation, so the "
                "map would change during the solve: use VariationalDropout"
            )


def _set(buffers: dict[tuple[nn.Module, str], Tensor]) -> None:
    for (part, name), buffer in buffers.items():
        setattr(part, name, buffer)
