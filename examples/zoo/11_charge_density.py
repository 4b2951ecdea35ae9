"""
Self-consistent charge, mixed
=============================

Electrons on a chain of 60 sites, hopping 1, at temperature T = 0.05, repel each other and see a few
impurities v. Each moves in the mean field of all, and so the density n is a fixed point::

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

L, TEMPERATURE, U = 60, 0.05, 2.0
site = torch.arange(L, dtype=torch.float64)
hopping = -torch.diag(torch.ones(L - 1, dtype=torch.float64), 1)
hopping = hopping + hopping.T
repulsion = U / (1 + (site[:, None] - site).square() / 4).sqrt()
v = torch.zeros(L, dtype=torch.float64)
v[14], v[40], v[41] = -2.0, 1.5, 1.5
v.requires_grad_()


def levels(n: Tensor) -> tuple[Tensor, Tensor]:
    """Compute energies (B, L) and orbitals (B, L, L) in the mean field of densities n, (B, L)."""
    return torch.linalg.eigh(hopping + torch.diag_embed(v + (n - 1) @ repulsion))


def chemical_potential(energies: Tensor) -> Tensor:
    """Find mu, (B, 1), that fills the levels by L electrons: a root itself."""

    def too_many(mu: Tensor) -> Tensor:
        return 2 * torch.sigmoid((mu - energies) / TEMPERATURE).sum(1, keepdim=True) - L

    return Root(Newton(rtol=1e-13))(too_many, energies.mean(1, keepdim=True)).check().z


def phi(n: Tensor) -> Tensor:
    """Compute the density of L electrons in the mean field of n, (B, L)."""
    energies, orbitals = levels(n)
    mu = chemical_potential(energies)
    occupation = 2 * torch.sigmoid((mu - energies) / TEMPERATURE)
    return (orbitals.square() * occupation[:, None]).sum(2)


z0 = torch.ones(1, L, dtype=torch.float64)
layer = FixedPoint(Anderson(beta=0.3, rtol=1e-12), Implicit())
record = {"rtol": 1e-9, "record": "residual"}
solvers = {
    "plain, beta = 0.3": Picard(beta=0.3, max_iter=60, **record),
    "plain, beta = 0.1": Picard(beta=0.1, max_iter=150, **record),
    "Anderson, beta = 0.3": Anderson(beta=0.3, **record),
}
traces = {}
for name, solver in solvers.items():
    found = solve(phi, z0, solver)
    traces[name] = found.trace.residual[:, 0]
    print(f"{name}: {found}")

n = layer(phi, z0).check().z[0]
here, there = (torch.autograd.grad(n[i], v, retain_graph=True)[0] for i in (14, 40))
print(f"response d n_14 / d v_40 = {here[40]:.8f}, d n_40 / d v_14 = {there[14]:.8f}")
with torch.no_grad():
    v[14] += 1e-5
    moved = solve(phi, z0, layer.solver).z[0]
    v[14] -= 1e-5
apart = ((moved - n)[40] / 1e-5 / there[14] - 1).abs()
print(f"by a difference quotient: {apart:.0e} away, relative; {n.sum():.6f} electrons")

# %%
# Top: residuals in units of the tolerance. Middle: the density. Bottom: its response at one site to
# the potential of each: screening leaves little of it far away.
_, (top, middle, bottom) = plt.subplots(3, 1, figsize=(5, 7), layout="constrained")
for name, trace in traces.items():
    top.semilogy(trace, label=name)
top.set(xlabel="update", ylabel="residual / tolerance", ylim=(1e-5, None))
top.legend(fontsize="small", loc="lower right")
middle.plot(site, n.detach(), ".-")
middle.set(xlabel="site", ylabel="density (electrons / site)")
bottom.plot(site, here, ".-")
bottom.set(xlabel="site j", ylabel="d n_14 / d v_j")
plt.show()
