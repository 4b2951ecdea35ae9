"""Parameters that can be drawn again, as those of the modules of torch.nn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm, norm_except_dim

Start = Callable[[Tensor], Any]
"""Writes the first values of a parameter in place."""


def small_normal_(weight: Tensor) -> Tensor:
    """Draw from N(0, 0.1^2), as the papers do."""
    return weight.normal_().mul_(0.1)


class Resettable(nn.Module):
    """A module with the first values of each of its own parameters.

    Args:
        device, dtype: of the parameters, as for the modules of torch.nn.
    """

    def __init__(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._where: dict[str, Any] = {"device": device, "dtype": dtype}
        self._starts: dict[str, Start] = {}

    def new_parameter(self, name: str, *shape: int, start: Start) -> None:
        """Make a parameter with these first values."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, **self._where)))
        self._starts[name] = start
        self._reset(name)

    def reset_parameters(self) -> None:
        """Draw all parameters again, as the constructor does, also after `to_empty`."""
        for module in self.children():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        for name in self._starts:
            self._reset(name)

    @torch.no_grad()
    def _reset(self, name: str) -> None:
        start = self._starts[name]
        if parametrize.is_parametrized(self, name):
            parametrizations: Any = self.parametrizations[name]  # type: ignore[index]
            if parametrizations.is_tensor:
                start(parametrizations.original)
            else:  # as of a length and a direction
                setattr(self, name, start(torch.empty_like(getattr(self, name))))
            return
        _write(self, name, start)


def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter a value, in place; a parametrization decides what to store for it."""
    if parametrize.is_parametrized(module, name):
        setattr(module, name, value)
    elif not _write(module, name, lambda stored: stored.copy_(value)):
        raise ValueError(
            f"{name} of {type(module).__name__} is not a parameter: its start is fixed"
        )


def _write(module: nn.Module, name: str, start: Start) -> bool:
    """Write to a parameter in place, or to what a hook, as of pruning, makes it from; return
    whether there is one.
    """
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == name:
            direction: Any = module._parameters[f"{name}_v"]
            length: Any = module._parameters[f"{name}_g"]
            start(direction)
            length.copy_(norm_except_dim(direction, 2, hook.dim))
            return True
    stored = module._parameters.get(name, module._parameters.get(f"{name}_orig"))
    if stored is not None:
        start(stored)
    return stored is not None


def first_parameter(module: nn.Module) -> Tensor:
    """Return a parameter of the module, whose dtype and device stand for all."""
    todo: list[nn.Module | None] = [module]
    while todo:
        at = todo.pop()
        if at is not None:
            for parameter in at._parameters.values():
                if parameter is not None:
                    return parameter
            todo += list(at._modules.values())[::-1]
    raise ValueError(f"{type(module).__name__} has no parameters")


class Memo:
    """A value computed from tensors, and computed again only after they have changed.

    They are known by their products with a fixed vector: counters of versions miss writes through
    `.data`, and a tensor that a hook makes again each time has none.
    """

    def __init__(self) -> None:
        self._key: tuple[float, ...] = ()
        self._value: Tensor | None = None

    def get(self, tensors: tuple[Tensor, ...], make: Callable[[], Tensor]) -> Tensor:
        key = tuple([torch.dot(v.reshape(-1), _probe(v.numel(), v.dtype)).item() for v in tensors])
        if self._value is None or key != self._key:
            self._key, self._value = key, make()
        return self._value


@functools.lru_cache(maxsize=64)
def _probe(count: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.float64).cos().to(dtype)
