"""The spectral radius of d phi / d z, which decides whether plain iteration converges."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint._tree import Map, Packing, Tree
from fixpoint._validation import at_least
from fixpoint.analysis.arnoldi import hessenberg, largest, unit
from fixpoint.derivatives import MatrixMap, batch_jacobian, batch_vjp_of_units


def spectral_radius(
    phi: Map,
    z: Tree,
    *,
    memory: int = 64,
    power_steps: int = 64,
    generator: torch.Generator | None = None,
    batched: bool = True,
) -> Tensor:
    """Compute rho(J) of each sample, (B,), the largest |eigenvalue| of J = d phi / d z.

    Near z*, plain iteration converges iff rho < 1, by a factor rho an update; a norm of J, as in
    `contraction`, only bounds it from above. phi is evaluated once; rows of phi must be
    independent.

    With D <= `memory` from all eigenvalues of J in float64. Above that by Arnoldi's method: after
    `power_steps` power iterations, the largest |Ritz value| of J on a Krylov space of `memory`
    vectors, each sample on its own. Complex pairs and ties are found as well as real
    eigenvalues. Typical relative error with 64 + 64 products: 1e-6 where some eigenvalues stand
    out, 3e-3 for a dense random J of D = 1000, of either sign. A defective eigenvalue of index k
    is known only to about (eps ||J||)^(1/k), by either way. For a very large D lower `memory` and
    raise `power_steps`: memory = 2 is power iteration made right for one complex pair.

    Args:
        phi: map of a tree like z to one of the same structure, shapes and dtype.
        z: tensor, or nested tuple, list or dict of tensors, each (B, ...).
        memory: most vectors of the Krylov basis, each (B, D).
        power_steps: products J^T v made before, which need no memory.
        generator: of the random start of the Krylov space.
        batched: as for `FixedPoint`.

    Returns:
        rho without gradient, in the dtype of z; NaN for a sample whose products are not finite.

    Source: Saad (2011), Numerical methods for large eigenvalue problems, algorithm 6.2 (classical
        Gram-Schmidt, done twice).

    Example:
        >>> import torch
        >>> from fixpoint.analysis import spectral_radius
        >>> quarter_turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]])
        >>> spectral_radius(lambda z: z @ quarter_turn, torch.zeros(1, 2))
        tensor([0.9000])
    """
    at_least(1, memory=memory)
    at_least(0, power_steps=power_steps)
    packing = Packing(z, batched=batched)
    with torch.enable_grad():
        matrix = packing.pack(z).detach().requires_grad_()
        fz = packing.wrap(phi)(matrix)
    B, D = matrix.shape
    if 0 in (B, D) or not fz.requires_grad:
        return torch.zeros(B, dtype=matrix.dtype, device=matrix.device)
    if memory >= D:
        return largest(batch_vjp_of_units(fz, matrix)).to(matrix.dtype)

    def product(v: Tensor) -> Tensor:
        (w,) = torch.autograd.grad(
            fz, matrix, v.to(matrix.dtype), retain_graph=True, allow_unused=True
        )
        return torch.zeros_like(v) if w is None else w.to(v.dtype)

    dtype = torch.promote_types(matrix.dtype, torch.float32)
    v = torch.randn(B, D, dtype=dtype, device=matrix.device, generator=generator)
    v = unit(v)
    for _ in range(power_steps):
        v = unit(product(v))
    return largest(hessenberg(product, v, memory)).to(matrix.dtype)


def eigenvalues(phi: MatrixMap, z: Tensor) -> Tensor:
    """Return all eigenvalues of J = d phi / d z, (B, D) complex, largest modulus first.

    From the dense J in float64: D up to about a thousand. An update with step eta multiplies the
    error along an eigenvector by 1 + eta (lambda - 1).

    Args:
        phi: map of (B, D) states, rows independent.
        z: (B, D).

    Returns:
        complex128, without gradient; NaN for a sample where J is not finite.

    Source: Zhang et al. (2019), section 3.2: the spectrum of f'(z) = J - I.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import eigenvalues
        >>> quarter_turn = torch.tensor([[0.0, -0.5], [0.5, 0.0]])
        >>> eigenvalues(lambda z: z @ quarter_turn, torch.zeros(1, 2)).imag.abs()
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    J = batch_jacobian(phi, z).detach().double()
    good = (z.isfinite().all(1) & J.isfinite().all(2).all(1))[:, None]
    values = torch.linalg.eigvals(torch.where(good[..., None], J, 0.0))
    order = values.abs().argsort(dim=1, descending=True)
    return torch.where(good, values.gather(1, order), complex("nan"))
