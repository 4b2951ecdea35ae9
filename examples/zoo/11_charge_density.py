"""
Self-consistent charge, mixed
=============================

Electrons on a chain of 60 sites, hopping 1, at temperature T = 0.05, repel each other and see a few
impurities v. Each moves in the mean field of all, and so the density n is a fixed point:

    n = phi(n) = 2 diag f(H(n)), H(n) = hopping + diag(v + K (n - 1)), f = Fermi's function,

K_ij = U / sqrt(1 + (i - j)^2 / 4) a softened Coulomb law. A long chain sloshes: a charge moved to
one end pushes it all back, too far, the more so the longer the chain. Plain mixing
n <- n + beta (phi(n) - n) needs a small beta and many steps, Anderson's method few. Their gradient
is the response: d n_i / d v_j, which Maxwell's relation says is symmetric.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fixpoint import Anderson, FixedPoint, Implicit, Newton, Picard, Root, solve

L, TEMPERATURE, U = 60, 0.05, 1.0
site = torch.arange(L, dtype=torch.float64)
hopping = -torch.diag(torch.ones(L - 1, dtype=torch.float64), 1)
hopping = hopping + hopping.T
repulsion = U / (1 + (site[:, None] - site).square() / 4).sqrt()
v = torch.zeros(L, dtype=torch.float64)
v[14], v[40], v[41] = -2.0, 1.5, 1.5
v.requires_grad_()


def levels(n: Tensor) -> tuple[Tensor, Tensor]:
    """Energies (B, L) and orbitals (B, L, L) in the mean field of densities n, (B, L)."""
    return torch.linalg.eigh(hopping + torch.diag_embed(v + (n - 1) @ repulsion))


def chemical_potential(energies: Tensor) -> Tensor:
    """mu, (B, 1), with which Fermi's function fills the levels by L electrons: a root itself."""

    def too_many(mu: Tensor) -> Tensor:
        return 2 * torch.sigmoid((mu - energies) / TEMPERATURE).sum(1, keepdim=True) - L

    return Root(Newton(rtol=1e-13))(too_many, energies.mean(1, keepdim=True)).check().z


def phi(n: Tensor) -> Tensor:
    """The density of L electrons in the mean field of n, (B, L)."""
    energies, orbitals = levels(n)
    mu = chemical_potential(energies)
    occupation = 2 * torch.sigmoid((mu - energies) / TEMPERATURE)
    return (orbitals.square() * occupation[:, None]).sum(2)


z0 = torch.ones(1, L, dtype=torch.float64)
for solver in [Picard(beta=b, max_iter=400, rtol=1e-8, record="residual") for b in (1, .3, .1, 0.05)]+[Anderson(beta=.3, rtol=1e-8, record="residual")]:
    s = solve(phi, z0, solver)
    print(solver, s)
n = FixedPoint(Anderson(beta=0.3,rtol=1e-12), Implicit())(phi, z0).check().z[0]
g1, = torch.autograd.grad(n[14], v, retain_graph=True)
g2, = torch.autograd.grad(n[40], v)
print(g1[40], g2[14])
