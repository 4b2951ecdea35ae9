"""The solve itself, without gradient, for those ways that differentiate its solution."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fixpoint._modes import unrecorded
from fixpoint._torch import gradients, inside_forward_mode, no_gradients
from fixpoint.derivatives import MatrixMap
from fixpoint.solution import Solution

T = TypeVar("T")

NO_GRAPH = "does not require grad"
"""What torch.autograd.grad says where it is called without grad mode."""


def solve_without_gradient(run: Callable[[MatrixMap], Solution], phi: MatrixMap) -> Solution:
    """Return run(phi) without gradient, save for the first evaluation of phi.

    What phi makes once and keeps, such as a weight of `parametrize.cached()`, is made there and
    must have its graph. A phi that differentiates by torch.autograd itself is evaluated under
    grad mode each time.
    """
    if torch.compiler.is_compiling():
        with no_gradients():
            return run(phi)
    first = first_with_gradient(phi)
    with unrecorded(), no_gradients():
        return run_with_gradients_in_phi(run, first)


def run_with_gradients_in_phi(run: Callable[[MatrixMap], T], phi: MatrixMap) -> T:
    """Return run(phi); where phi differentiates by torch.autograd itself, each state requires a
    gradient within it.
    """
    try:
        return run(phi)
    except RuntimeError as error:
        if NO_GRAPH not in str(error) or torch.compiler.is_compiling():
            raise
    return run(_WithGradient(phi))


def first_with_gradient(phi: MatrixMap) -> MatrixMap:
    """Return phi, whose first evaluation has its graph where gradients are off by then."""
    tracking = torch.is_grad_enabled() or inside_forward_mode()
    return _FirstWithGradient(phi) if tracking else phi


class _FirstWithGradient:
    def __init__(self, phi: MatrixMap) -> None:
        self.phi, self.is_first, self.reverse = phi, True, torch.is_grad_enabled()
        self.columns = getattr(phi, "columns", ())

    def __call__(self, z: Tensor) -> Tensor:
        if not self.is_first:
            return self.phi(z)
        self.is_first = False
        differentiated = torch.is_grad_enabled()  # by the solver, which needs the graph
        with gradients(reverse=self.reverse):
            fz = self.phi(z)
        if not differentiated:
            return fz.detach()
        return self.phi(z) if inside_forward_mode() else fz


class _WithGradient:
    """phi, of states that require a gradient."""

    def __init__(self, phi: MatrixMap) -> None:
        self.phi, self.columns = phi, getattr(phi, "columns", ())

    def __call__(self, z: Tensor) -> Tensor:
        tracking = torch.is_grad_enabled()
        with torch.enable_grad():
            fz = self.phi(z if z.requires_grad else _without_graph(z).requires_grad_())
        return fz if tracking else _without_graph(fz)


def _without_graph(x: Tensor) -> Tensor:
    """Return x detached, with the tangent of forward mode, which `detach` drops."""
    if not inside_forward_mode():
        return x.detach()
    with torch.no_grad():
        return x.clone()
