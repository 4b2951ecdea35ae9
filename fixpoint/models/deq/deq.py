"""A deep equilibrium block: the equilibrium of a module with an injected input."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fixpoint._torch import tree_leaves, tree_map
from fixpoint._tree import Tree, no_tensor
from fixpoint._validation import at_least, names_options
from fixpoint.backward import Backward, Phantom
from fixpoint.failure import FailedRows, OnFailure
from fixpoint.fixed_point import FixedPoint
from fixpoint.models.deq.freezing import frozen
from fixpoint.models.deq.supervision import supervised_states
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
        f: module or function called as f(z, x), returning a tree like z; each batch row on its own.
        solver: a solver or its name, `Anderson()` if not given.
        backward: `Implicit()` if not given, `Unrolled`, or `Phantom`.
        hidden_size: H of a state z of shape (B, H); None for a state of the shape of x.
        eval_solver: solver of evaluation mode, with another tolerance or budget; None takes
            `solver`.
        failed: the gradient of samples that do not converge; see `FixedPoint`.
        on_failure: "warn" (once), "raise" or "ignore" where samples do not converge.

    Inputs: x, z0, batched, groups, options
        x: the injected input, a tree of tensors (B, ...).
        z0: start of the solve and shape of the state, any tree of (B, ...); zeros if not given. A
            warm start is the solution for an input nearby: `deq(x, deq.solution.z)`.
        batched: False where x and z0 have no batch axis, or where samples depend on each other, so
            that all are one state.
        groups: number of the sample of each row of x and z0, as the nodes of graphs have it; see
            `solve`. f is given them too where it has an argument of this name.
        options: of the solver, for this call alone, `deq(x, max_iter=100, rtol=1e-6)`; and further
            arguments of f by name, `deq(x, mask=mask)`.

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

    @names_options
    def __init__(
        self,
        f: Callable[..., Tree],
        solver: str | Solver | None = None,
        backward: Backward | str | None = None,
        *,
        hidden_size: int | None = None,
        eval_solver: str | Solver | None = None,
        failed: FailedRows | None = None,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__()
        if not callable(f):
            raise TypeError(f"f must be a module or a function of z and x; got {f!r}")
        self.f = f
        self.fixed_point = FixedPoint(solver, backward, failed=failed, on_failure=on_failure)
        self.evaluation: FixedPoint | None = None
        if eval_solver is not None:
            backward = self.fixed_point.backward
            self.evaluation = FixedPoint(
                eval_solver, backward, failed=failed, on_failure=on_failure
            )
        self.hidden_size = None if hidden_size is None else at_least(1, hidden_size=hidden_size)
        self.solution: Solution | None = None

    def forward(
        self,
        x: Tree,
        z0: Tree | None = None,
        *,
        batched: bool = True,
        groups: Tensor | None = None,
        **options: Any,
    ) -> Tree:
        with self._held(options, groups) as (f, options):
            return self._solve(f, x, z0, batched, groups, options)

    def states(
        self,
        x: Tree,
        z0: Tree | None = None,
        *,
        at: Sequence[int],
        gradient: Phantom | None = None,
        batched: bool = True,
        groups: Tensor | None = None,
        **options: Any,
    ) -> list[Tree]:
        """Return states along the solve, each differentiable, and z* last; see `supervised_states`.

        For a loss on the way to the equilibrium, as `correction_loss`.
        """
        with self._held(options, groups) as (f, options):
            states, self.solution = supervised_states(
                self._layer(),
                lambda z: f(z, x),
                self._start(x, batched) if z0 is None else z0,
                at=at,
                gradient=gradient,
                batched=batched,
                groups=groups,
                **options,
            )
        return states

    def regularized(
        self,
        x: Tree,
        z0: Tree | None = None,
        *,
        samples: int | None = 1,
        generator: torch.Generator | None = None,
        batched: bool = True,
        groups: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tree, Tensor]:
        """Return z* and the penalty `jac_reg` of f at z*, (B,), for one more evaluation of f.

        Its gradient reaches f, not z*: `loss + weight * penalty.mean()`.
        """
        with self._held(options, groups) as (f, options):
            z = self._solve(f, x, z0, batched, groups, options)
            penalty = jac_reg(
                lambda z: f(z, x),
                tree_map(torch.detach, z),
                samples=samples,
                generator=generator,
                batched=batched,
                groups=groups,
            )
        return z, penalty

    @contextmanager
    def _held(
        self, given: dict[str, Any], groups: Tensor | None
    ) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
        """Yield f frozen for a solve, with the given arguments that it takes, and the others."""
        own = {name: value for name, value in given.items() if _takes(self.f, name, value)}
        if groups is not None and _takes(self.f, "groups", None):
            own["groups"] = groups
        options = {name: value for name, value in given.items() if name not in own}
        still = frozen(self.f) if isinstance(self.f, nn.Module) else nullcontext(self.f)
        with still as f:
            yield (functools.partial(f, **own) if own else f), options

    def _solve(
        self,
        f: Callable[..., Any],
        x: Tree,
        z0: Tree | None,
        batched: bool,
        groups: Tensor | None,
        options: dict[str, Any],
    ) -> Tree:
        start = self._start(x, batched) if z0 is None else z0
        solution = self._layer()(
            lambda z: f(z, x), start, batched=batched, groups=groups, **options
        )
        self.solution = replace(solution, z=tree_map(torch.detach, solution.z))
        return solution.z

    def _layer(self) -> FixedPoint:
        if self.training or self.evaluation is None:
            return self.fixed_point
        return self.evaluation

    def _start(self, x: Tree, batched: bool) -> Tree:
        if self.hidden_size is None:
            return tree_map(torch.zeros_like, x)
        leaf = tree_leaves(x)[0]
        if not isinstance(leaf, Tensor):
            raise no_tensor("x", leaf)
        return leaf.new_zeros(*leaf.shape[: int(batched)], self.hidden_size)

    def extra_repr(self) -> str:
        return "" if self.hidden_size is None else f"hidden_size={self.hidden_size}"


def _takes(f: Callable[..., Any], name: str, value: Any) -> bool:
    """Tell whether f has an argument of that name behind z and x, or takes any tensors by name."""
    parameters = inspect.signature(f.forward if isinstance(f, nn.Module) else f).parameters
    if name in list(parameters)[2:]:
        return True
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
