"""A penalty on the Jacobian of phi, which keeps an equilibrium easy to find while training."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint._tree import Map, Packing, Tree
from fixpoint._validation import at_least
from fixpoint.derivatives import batch_vjp_of_units


def jac_reg(
    phi: Map,
    z: Tree,
    *,
    samples: int | None = 1,
    generator: torch.Generator | None = None,
    batched: bool = True,
    groups: Tensor | None = None,
) -> Tensor:
    """Return ||J||_F^2 / D of each sample, (B,), J = d phi / d z: a penalty to add to the loss.

    Training makes equilibria ever harder to find; a small weight on this penalty at z* keeps
    the solver's iterations down. Estimated by mean_i ||J^T v_i||^2 / D, whose expectation over
    random signs v_i it is: one evaluation of phi and a vector-Jacobian product for each of the
    `samples`. A bound on the 2-norm of a weight (`fixpoint.models.bound_spectral_norm`) is the
    alternative that needs no weight in the loss, and restricts the model more.

    Differentiable under grad mode with respect to all that phi closes over, and to z where z asks
    for it; detach z to penalise the map alone, as the source does. Rows of phi must be
    independent.

    Args:
        phi: map of a tree like z to one of the same structure, shapes and dtype.
        z: tensor, or nested tuple, list or dict of tensors, each (B, ...).
        samples: number of random vectors, one usually being enough; None takes all D unit
            vectors, which gives the exact value.
        generator: of the random signs.
        batched, groups: as for `FixedPoint`.

    Source: Bai, Koltun, Kolter (2021), Stabilizing equilibrium models by Jacobian regularization,
        with signs in place of Gaussian numbers, whose variance is never smaller (Hutchinson
        1990).

    Example:
        >>> import torch
        >>> from fixpoint.regularization import jac_reg
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> penalty = jac_reg(lambda z: a * z, torch.zeros(3, 4))
        >>> penalty
        tensor([0.2500, 0.2500, 0.2500], grad_fn=<DivBackward0>)
        >>> penalty.mean().backward()
        >>> a.grad
        tensor(1.0000)
    """
    packing = Packing(z, batched=batched, groups=groups)
    tracking = torch.is_grad_enabled()
    with torch.enable_grad():
        matrix = packing.pack(z)
        if not (tracking and matrix.requires_grad):
            matrix = matrix.detach().requires_grad_()
        fz = packing.wrap(phi)(matrix)
    size: int | Tensor = max(matrix.shape[1], 1)
    if packing.groups is not None:
        sizes = packing.groups.fill(packing.columns).sum(1)
        size = torch.from_numpy(sizes).to(matrix.device).clamp_min(1)
    if samples is None:
        J = batch_vjp_of_units(fz, matrix, create_graph=tracking)
        return _squares(J.flatten(1)) / size
    total = matrix.new_zeros(len(matrix), dtype=_sum_dtype(matrix))
    for left in reversed(range(at_least(1, samples=samples))):
        v = torch.empty_like(matrix, requires_grad=False).bernoulli_(0.5, generator=generator)
        product = _vjp(fz, matrix, 2 * v - 1, keep=tracking or left > 0, tracking=tracking)
        if product is not None:
            total = total + _squares(product)
    return total / (samples * size)


def _vjp(fz: Tensor, z: Tensor, v: Tensor, *, keep: bool, tracking: bool) -> Tensor | None:
    """Return J^T v of each sample, (B, D); None where fz does not depend on z."""
    if not fz.requires_grad:
        return None
    return torch.autograd.grad(
        fz, z, v, retain_graph=keep, create_graph=tracking, allow_unused=True
    )[0]


def _squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each row, (B,), in float32 at least."""
    return x.to(_sum_dtype(x)).square().sum(1)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
