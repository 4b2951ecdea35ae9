"""The implicit gradient of a solution that something else has found."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from fixpoint._messages import unknown_name
from fixpoint._roots import Known, RootMap, hides_axis, scale_at
from fixpoint._torch import inside_forward_mode, outside_graph, primal
from fixpoint._tree import Map, Packing, Tree
from fixpoint._validation import names_options, positive
from fixpoint.backward import Backward, Implicit, Reversible, Unrolled
from fixpoint.backward._evaluation import solve_without_gradient
from fixpoint.derivatives import MatrixMap
from fixpoint.failure import ConvergenceWarning, some_failed
from fixpoint.fixed_point import with_failed_rows
from fixpoint.solution import ConvergenceError, Solution, has_failed
from fixpoint.solvers import Newton, Picard
from fixpoint.tracing import at_level_zero

Form = Literal["fixed-point", "root"]
DIRECT_SIZE = 64
"""Largest D whose linear problem is solved by a matrix of its own."""


@names_options
def attach_gradient(
    phi: Map,
    z: Tree,
    *,
    form: Form = "fixed-point",
    backward: Backward | None = None,
    rtol: float = 1e-3,
    batched: bool = True,
    groups: Tensor | None = None,
) -> Tree:
    """Return z with the implicit gradient that it has as the solution of z = phi(z) or phi(z) = 0.

    For a z that SciPy, C++, a simulator or a checkpoint has given; it is not solved again. One
    evaluation measures its residual, and samples that do not solve the equation are reported: their
    gradient is wrong by as much as z is, and the backward's `failed` may leave it out. Derivatives
    of any order, torch.func and forward mode as with `Implicit`.

    Args:
        phi: map of a tree like z to one of the same structure, shapes and dtype, which closes over
            the tensors that gradients go to; each batch row on its own.
        z: the solution; a tensor, or nested tuple, list or dict of tensors, each (B, ...).
        form: "fixed-point" where z = phi(z), "root" where phi(z) = 0.
        backward: `Implicit` with a linear solve by a matrix for samples of up to 64 numbers and by
            Krylov products for larger ones, if it is not given or has no solver; or `Phantom`.
        rtol: of the residual, relative to z; in the units of `solve_root` for a root.
        batched, groups: as for `solve`.

    Raises:
        ValueError: an unknown form, phi returns another structure or shape, or groups are not
            numbers of the rows.
        TypeError: z is not a tree of floating-point or complex tensors, or the backward needs the
            updates of a solve.

    Example:
        >>> import numpy as np
        >>> import scipy.optimize
        >>> import torch
        >>> from fixpoint import attach_gradient
        >>> found = scipy.optimize.brentq(lambda z: z - np.cos(0.5 * z), 0, 1)
        >>> a = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
        >>> z = attach_gradient(lambda z: torch.cos(a * z), torch.tensor([[found]]).double())
        >>> z.sum().backward()
        >>> a.grad.round(decimals=4)  # -z sin(a z) / (1 + a sin(a z))
        tensor([[-0.3218]], dtype=torch.float64)
    """
    if form not in get_args(Form):
        raise ValueError(unknown_name("form", form, get_args(Form)))
    if isinstance(backward, (Unrolled, Reversible)):
        raise TypeError(
            f"{type(backward).__name__} differentiates the updates of a solve, which are not known "
            "here: take Implicit() or Phantom()"
        )
    given = form, backward, positive(rtol=rtol), batched, groups
    return outside_graph(_attach, phi, z, *given)


def _attach(
    phi: Map,
    z: Tree,
    form: Form,
    backward: Backward | None,
    rtol: float,
    batched: bool,
    groups: Tensor | None,
) -> Tree:
    packing = Packing(z, batched=batched, groups=groups)
    start = packing.start(z)
    packed: MatrixMap = packing.wrap(phi)
    backward = _ready(backward, sum(packing.columns), packing.dtype)
    if form == "root":
        packed = RootMap(packed, scale_at(packed, start))
    measure = Picard(max_iter=0, rtol=rtol)
    if hides_axis(packed, start):
        fixed = measure.with_options(rtol=0.0, atol=0.0)  # no value can be read here
        return packing.unpack(backward.solve(fixed, packed, start, None).z.clone())
    solution = _measured(measure, packed, start)
    attached = backward.solve(Known(measure, solution), packed, solution.z, None)
    if some_failed(solution.result):
        if backward.failed == "raise":
            raise ConvergenceError(_failures(solution, rtol, form))
        warnings.warn(_failures(solution, rtol, form), ConvergenceWarning, stacklevel=3)
        attached = with_failed_rows(attached, packed, backward.failed)
    return packing.unpack(attached.z.clone())


def _ready(backward: Backward | None, size: int, dtype: torch.dtype) -> Backward:
    """Return the backward with a linear solver: that of a solve is not known here."""
    if backward is None:
        backward = Implicit(failed="keep")
    if not isinstance(backward, Implicit) or backward.solver is not None:
        return backward
    linear: Literal["direct", "gmres"] = "direct" if size <= DIRECT_SIZE else "gmres"
    return Implicit(
        Newton(linear=linear, rtol=100 * torch.finfo(dtype).eps, atol=0.0, max_iter=100),
        failed=backward.failed,
        adjoint_preconditioner=backward.adjoint_preconditioner,
        on_failure=backward.non_convergence.on_failure,
    )


def _measured(measure: Picard, phi: MatrixMap, z: Tensor) -> Solution:
    def run(phi: MatrixMap) -> Solution:
        return measure.run(phi, primal(z))

    if inside_forward_mode():
        return at_level_zero(run, phi)
    return solve_without_gradient(run, phi)


def _failures(solution: Solution, rtol: float, form: Form) -> str:
    failed = has_failed(solution.result)
    assert solution.residual is not None
    largest = rtol * float(solution.residual[failed].max())
    equation = "phi(z) = 0" if form == "root" else "z = phi(z)"
    return (
        f"{int(failed.sum())} of {failed.numel()} samples of z do not solve {equation}: their "
        f"residual, relative to z, is up to {largest:.3g} (rtol={rtol:g}), and a gradient there is "
        "wrong by as much: solve further, check the form, or raise rtol"
    )
