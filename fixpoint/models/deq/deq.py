"""A deep equilibrium block: the equilibrium of a module with an injected input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fixpoint._torch import tree_leaves, tree_map
from fixpoint._tree import Tree
from fixpoint._validation import at_least
from fixpoint.backward import Backward
from fixpoint.fixed_point import FixedPoint
from fixpoint.models.deq.freezing import frozen
from fixpoint.regularization import jac_reg
from fixpoint.solution import Solution
from fixpoint.solvers import Solver


class DEQ(nn.Module):
    """z* = f(z*, x): a layer of unlimited depth with the memory of one evaluation of f.

    `FixedPoint` with a module for its map, held still during each solve (see `frozen`): masks of
    `VariationalDropout` are drawn once a call, running statistics updated once a call. A fixed
    point exists for certain only where f contracts; `bound_spectral_norm` guarantees it,
    `regularized` penalizes its violation.

    Args:
        f: module called as f(z, x), returning a tree like z; each batch row on its own.
        solver: a solver or its name, `Anderson()` if not given.
        backward: `Implicit()` if not given, `Unrolled`, or `Phantom`.
        hidden_size: H of a state z of shape (B, H); None for a state of the shape of x.

    Inputs: x, z0
        x: the injected input, a tree of tensors (B, ...).
        z0: start of the solve and shape of the state, any tree of (B, ...); zeros if not given. A
            warm start is the solution for an input nearby: `deq(x, deq.solution.z)`.

    Outputs: z
        z: z*, a tree like z0.

    Attributes:
        solution: `Solution` of the last call, its z detached; None before the first. It does not
            raise where samples failed: `deq.solution.check()` does.

    Raises:
        ValueError: solver and backward do not fit, or hidden_size is below 1, when built; f
            returns another structure or shape, or holds a dropout of torch, when called.

    Source: Bai, Kolter, Koltun (2019), Deep equilibrium models.

    Example:
        >>> import torch
        >>> from fixpoint.models import DEQ, bound_spectral_norm
        >>> class Layer(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.W = bound_spectral_norm(torch.nn.Linear(16, 16), bound=0.8)
        ...         self.U = torch.nn.Linear(5, 16)
        ...
        ...     def forward(self, z, x):
        ...         return torch.tanh(self.W(z) + self.U(x))
        >>> deq = DEQ(Layer(), hidden_size=16)
        >>> deq(torch.randn(3, 5)).shape
        torch.Size([3, 16])
        >>> deq.solution.converged.tolist()
        [True, True, True]
    """

    def __init__(
        self,
        f: nn.Module,
        solver: str | Solver | None = None,
        backward: Backward | None = None,
        *,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__()
        self.f = f
        self.fixed_point = FixedPoint(solver, backward)
        self.hidden_size = None if hidden_size is None else at_least(1, hidden_size=hidden_size)
        self.solution: Solution | None = None

    def forward(self, x: Tree, z0: Tree | None = None) -> Tree:
        with frozen(self.f) as f:
            return self._solve(f, x, z0)

    def regularized(
        self,
        x: Tree,
        z0: Tree | None = None,
        *,
        samples: int | None = 1,
        generator: torch.Generator | None = None,
    ) -> tuple[Tree, Tensor]:
        """z* and the penalty `jac_reg` of f at z*, (B,), for one more evaluation of f.

        Its gradient reaches f, not z*: `loss + weight * penalty.mean()`.
        """
        with frozen(self.f) as f:
            z = self._solve(f, x, z0)
            fixed = tree_map(torch.detach, z)
            penalty = jac_reg(lambda z: f(z, x), fixed, samples=samples, generator=generator)
        return z, penalty

    def _solve(self, f: Callable[..., Any], x: Tree, z0: Tree | None) -> Tree:
        solution = self.fixed_point(lambda z: f(z, x), self._start(x) if z0 is None else z0)
        self.solution = replace(solution, z=tree_map(torch.detach, solution.z))
        return solution.z

    def _start(self, x: Tree) -> Tree:
        if self.hidden_size is None:
            return tree_map(torch.zeros_like, x)
        leaf = tree_leaves(x)[0]
        return leaf.new_zeros(leaf.shape[0], self.hidden_size)

    def extra_repr(self) -> str:
        return "" if self.hidden_size is None else f"hidden_size={self.hidden_size}"


setattr(DEQ, "regularised", DEQ.regularized)  # noqa: B010 (the former name; see CHANGELOG)
