"""A solve that is made in parts, and whose samples may be replaced by others on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fixpoint._torch import from_host, tree_flatten, tree_map, tree_unflatten
from fixpoint._tree import Packing, Tree
from fixpoint._validation import at_least, names_options
from fixpoint.derivatives import Derivatives
from fixpoint.solution import Solution
from fixpoint.solvers import IterativeSolver, Solver, make_solver
from fixpoint.solvers._rowwise import choose_rows
from fixpoint.solvers.loop.eager import Problem, Run
from fixpoint.solvers.loop.norms import Norms


class ResumableSolve:
    """A solve of z = phi(z, *inputs) in parts, without gradient: a batch whose slots are refilled.

    Samples need different numbers of updates. Where many are waiting, a slot whose sample has ended
    takes the next one, and phi is always evaluated for a full batch (continuous batching in depth).
    Each sample has its own `max_iter` updates, tolerance and history, as if it were solved alone;
    with `check_every` the host also looks where the budget of a sample ends.
    `attach_gradient` makes a solution differentiable.

    Args:
        phi: map of z, and of inputs that belong to its samples; each row on its own.
        z0: tensor, or nested tuple, list or dict of tensors, each (B, ...).
        inputs: further arguments of phi, trees of tensors (B, ...).
        solver: `Picard`, `DampedPicard`, `Anderson`, `SQUAREM` or `Broyden(memory=m)`, or a name.

    Attributes:
        finished: samples that have ended, (B,) bool.
        updates: made so far.

    Raises:
        ValueError: the solver has no tolerance, ends batches together, or has numbered steps.
        NotImplementedError: the solver has no state of fixed shape.

    Example:
        >>> import torch
        >>> from fixpoint import Picard, ResumableSolve
        >>> rates = torch.tensor([[0.1], [0.9]])
        >>> run = ResumableSolve(lambda z, a: a * z + 1, torch.zeros(2, 1), rates, solver=Picard())
        >>> run.advance(20).tolist()
        [True, False]
        >>> slot = torch.tensor([0])
        >>> run.take(slot).z
        tensor([[1.1111]])
        >>> run.refill(slot, torch.zeros(1, 1), torch.full((1, 1), 0.5))
        >>> run.advance(20).tolist(), run.take(slot).z
        ([True, False], tensor([[2.0000]]))
    """

    @names_options
    def __init__(
        self, phi: Any, z0: Tree, *inputs: Tree, solver: str | Solver = "anderson"
    ) -> None:
        solver = make_solver(solver)
        self.packing, self.inputs = Packing(z0), inputs
        packed = self.packing.wrap(lambda z: phi(z, *self.inputs))
        self.fixed = _FixedForm(_checked(solver))
        with torch.no_grad():
            z = self.packing.start(z0).detach()
            norms = Norms(z, solver.tolerance, packed.columns)
            most = 2**62  # updates of all samples
            problem = Problem(packed, Derivatives(packed))
            self._run = Run(self.fixed, problem, z, norms, most=most)
        self._run.course.give_each(solver.max_iter)

    @property
    def updates(self) -> int:
        return self._run.updates

    @property
    def finished(self) -> Tensor:
        return from_host(~self._run.course.status.active, self._run.z.device)

    @torch.no_grad()
    def advance(self, count: int) -> Tensor:
        """Make that many updates, fewer where all samples end before; return `finished`.

        Raises:
            RuntimeError: rows of phi depend on each other.
        """
        course = self._run.course
        for _ in range(at_least(0, count=count)):
            if course.done:
                break
            self._run.advance()
            if course.coupled:
                raise RuntimeError(
                    "a sample that had converged no longer has: rows of phi depend on each other, "
                    "and slots cannot be refilled one by one; solve(..., batched=False) solves all"
                )
        return self.finished

    def take(self, rows: Tensor) -> Solution:
        """Return the `Solution` of the samples in some slots, as they stand.

        Args:
            rows: slots, numbers (n,), or (B,) bool.
        """
        whole = self._run.solution()
        z = tree_map(lambda x: x[rows], self.packing.unpack(whole.z))
        return whole.with_samples(z, lambda x: x[rows])

    @torch.no_grad()
    def refill(self, rows: Tensor, z0: Tree, *inputs: Tree) -> None:
        """Put new samples into some slots, which begin with the next update.

        Args:
            rows: slots, n numbers (n,), or (B,) bool.
            z0: starts, a tree like z0 of (n, ...).
            inputs: of the new samples, trees of (n, ...), as many as at the start.

        Raises:
            ValueError: another number of inputs.
        """
        if len(inputs) != len(self.inputs):
            raise ValueError(
                f"refill needs the {len(self.inputs)} inputs that phi takes for its samples; got "
                f"{len(inputs)}"
            )
        run = self._run
        self.inputs = tuple(
            _put(rows, new, old) for new, old in zip(inputs, self.inputs, strict=True)
        )
        z = self.packing.pack(_put(rows, z0, self.packing.unpack(run.z)))
        mask = torch.zeros(len(run.z), dtype=torch.bool, device=run.z.device)
        mask[rows] = True
        self.fixed.replace(mask, z)
        run.course.renew(mask.cpu().numpy())


class _FixedForm:
    """A solver by its state of fixed shape, in which rows can begin again."""

    def __init__(self, solver: IterativeSolver) -> None:
        self.solver = solver
        self.starts: tuple[Tensor, Tensor] | None = None  # rows that begin, and all states
        self.begun: Tensor | None = None
        self.first: Tensor | None = None  # number of the first update of each row, (B,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.solver, name)

    def init(self, z: Tensor, t: int | None) -> None:
        """Return none: there is no state before phi(z)."""

    def replace(self, rows: Tensor, z: Tensor) -> None:
        """Give other states, (B, D), for some rows, (B,), at the next update."""
        if self.starts is not None:
            before, states = self.starts
            rows, z = rows | before, choose_rows(rows, z, states)
        self.starts = rows, z

    def update(self, k: int, z: Tensor, fz: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return `update_fixed`, with a new state for rows that have just begun."""
        number = torch.tensor(k, device=z.device)
        if state is None or self.first is None:
            state, self.first = self.solver.init_fixed(z, fz), number.expand(len(z))
        elif self.begun is not None:
            state = _rows_of(self.begun, self.solver.init_fixed(z, fz), state)
            self.first = torch.where(self.begun, number, self.first)
        new, state = self.solver.update_fixed(number - self.first, z, fz, state)
        self.begun = None
        if self.starts is not None:
            new, self.begun = choose_rows(*self.starts, new), self.starts[0]
            self.starts = None
        return new, state

    def restart(self, state: Any, rows: Tensor, z: Tensor, fz: Tensor) -> Any:
        return self.solver.restart_fixed(state, rows, z, fz)


def _checked(solver: Solver) -> IterativeSolver:
    if not isinstance(solver, IterativeSolver) or not solver.has_fixed_form:
        raise NotImplementedError(
            f"{type(solver).__name__} has no state in which a sample can begin: take Picard, "
            "DampedPicard, Anderson, SQUAREM or Broyden(memory=m)"
        )
    if not solver.state_has_rows or not solver.has_tolerance:
        raise ValueError(
            f"{type(solver).__name__} makes numbered steps or has rtol = atol = 0, and each sample "
            "has to end by itself: take a solver with a tolerance, as Picard"
        )
    if solver.stop != "each":
        raise ValueError(f'slots end one by one: stop must be "each"; got {solver.stop!r}')
    return solver


def _put(rows: Tensor, new: Tree, old: Tree) -> Tree:
    """Return the tree of (B, ...) tensors with new ones, (n, ...), in some rows."""
    leaves, structure = tree_flatten(old)
    given, other = tree_flatten(new)
    if other != structure:
        raise ValueError(f"new samples need trees like those they replace; got {other}")
    out = []
    for x, value in zip(leaves, given, strict=True):
        x = x.clone()
        x[rows] = value
        out.append(x)
    return tree_unflatten(out, structure)


def _rows_of(rows: Tensor, new: Any, old: Any) -> Any:
    """Return a solver's state, (B, ...) tensors, with some of its rows from another one."""
    (leaves, structure), (others, _) = tree_flatten(new), tree_flatten(old)
    chosen = [
        torch.where(rows.view(-1, *(1,) * (x.dim() - 1)), x, y)
        for x, y in zip(leaves, others, strict=True)
    ]
    return tree_unflatten(chosen, structure)
