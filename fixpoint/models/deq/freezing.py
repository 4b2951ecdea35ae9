"""Freeze dropout masks, buffers and parametrized weights of a module during a solve."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fixpoint.models.deq.variational_dropout import MASKS, Masks, VariationalDropout

DROPOUTS = (
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
    """Freeze the module for one solve, as a map that does not change between evaluations.

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
        ValueError: the module has a dropout of torch in training mode, also that of
            `nn.MultiheadAttention`, `nn.LSTM`, ... A call of
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
    """The map that `frozen` gives.

    Several threads may evaluate maps of one module at a time: masks and weights belong to the
    thread, buffers to the one that holds their lock.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.function = function
        # A weight within a held map that is being evaluated is held already.
        self.weights = {
            part: part()
            for part in module.modules()
            if isinstance(part, parametrize.ParametrizationList) and part not in WEIGHTS.get()
        }
        training = [part for part in module.modules() if part.training]
        _refuse_changing(training)
        self.dropouts = [part for part in training if isinstance(part, VariationalDropout)]
        self.masks: Masks = {}
        changing = [part for part in training if any(True for _ in part.buffers(recurse=False))]
        # While another thread evaluates, the module has copies of that thread in place of its own.
        with BUFFERS if changing else nullcontext():
            self.buffers = {
                (part, name): buffer
                for part in changing
                for name, buffer in part.named_buffers(recurse=False)
            }
            self.start = {key: buffer.detach().clone() for key, buffer in self.buffers.items()}
        self.last: dict[tuple[nn.Module, str], Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        masks = dict.fromkeys(self.dropouts, self.masks)
        with ExitStack() as stack:
            if self.dropouts:
                stack.enter_context(_value(MASKS, {**masks, **MASKS.get()}))
            if self.weights:
                stack.enter_context(_value(WEIGHTS, {**self.weights, **WEIGHTS.get()}))
                stack.enter_context(_read_from_context(list(self.weights)))
            if not self.buffers:
                return self.function(*args, **kwargs)
            with BUFFERS:
                return self._with_buffers(args, kwargs)

    def _with_buffers(self, args: Any, kwargs: Any) -> Any:
        # Fresh copies: what one evaluation saved for its backward pass the next may not write to.
        copies = {key: buffer.clone() for key, buffer in self.start.items()}
        before = {(part, name): getattr(part, name) for part, name in copies}
        try:
            _set(copies)
            result = self.function(*args, **kwargs)
            self.last = {(part, name): getattr(part, name) for part, name in copies}
            return result
        finally:
            _set(before)

    def commit(self) -> None:
        """Give the buffers their values after the last evaluation."""
        with BUFFERS if self.last else nullcontext():
            for key, value in self.last.items():
                # In place: others, such as a distributed wrapper, hold the same tensors.
                self.buffers[key].copy_(value)


WEIGHTS: ContextVar[Mapping[nn.Module, Tensor]] = ContextVar(
    "WEIGHTS", default=MappingProxyType({})
)
"""Of each parametrization in the maps that this thread evaluates the weight."""
BUFFERS = threading.RLock()
"""Held by the thread that has put copies of buffers into modules."""
_readers: Counter[parametrize.ParametrizationList] = Counter()
"""How many evaluations read each parametrization from `WEIGHTS`."""
_installing = threading.Lock()


@contextmanager
def _value(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def _read_from_context(parts: list[parametrize.ParametrizationList]) -> Iterator[None]:
    """Let these parametrizations give, within the block, the weights of the thread that asks."""
    with _installing:
        for part in parts:
            _readers[part] += 1
            vars(part)["forward"] = functools.partial(_weight, part)
    try:
        yield
    finally:
        with _installing:
            for part in parts:
                _readers[part] -= 1
                if not _readers[part]:
                    del _readers[part], vars(part)["forward"]


def _weight(part: parametrize.ParametrizationList) -> Tensor:
    weight = WEIGHTS.get().get(part)
    if weight is None:  # of another thread
        return type(part).forward(part)
    return weight if torch.is_grad_enabled() else weight.detach()


def _refuse_changing(parts: list[nn.Module]) -> None:
    for part in parts:
        kind, (option, p) = type(part).__name__, _dropout_of(part)
        drawn, remedy = "", "use VariationalDropout"
        if p > 0:
            drawn = f"({option}={p:g}) draws a new mask"
            if option != "p":
                remedy = f"set {option}=0, and use VariationalDropout on what it returns"
        elif isinstance(part, nn.RReLU) and part.lower < part.upper:
            drawn, remedy = f"({part.extra_repr()}) draws new slopes", "use nn.LeakyReLU"
        if drawn:
            raise ValueError(
                f"{kind}{drawn} at each evaluation, so the map would change during the solve: "
                f"{remedy}"
            )


def _dropout_of(part: nn.Module) -> tuple[str, float]:
    """Return the option of a module of torch that sets its random masks, and its value."""
    if isinstance(part, DROPOUTS):
        return "p", part.p
    if isinstance(part, nn.MultiheadAttention):
        return "dropout", part.dropout
    if isinstance(part, nn.RNNBase) and part.num_layers > 1:
        return "dropout", part.dropout
    return "p", 0.0


def _set(buffers: dict[tuple[nn.Module, str], Tensor]) -> None:
    for (part, name), buffer in buffers.items():
        setattr(part, name, buffer)
