"""
Bratu's equation, preconditioned
================================

The steady temperature of a reacting square, -Δu = λ exp(u) with u = 0 on its edge. On a grid of
101 x 101 points u is a state of D = 10^4. The five-point Laplacian L is diagonal in sines, so that
L^-1 costs four products of 101 x 101, and the equation is the fixed point ::

    u = phi(u) = L^-1 λ exp(u),

preconditioned: its rate does not depend on the grid. Eight values of λ are eight samples of a
batch, and each stops by itself. The branch ends in a fold at λ = 6.808, where plain iteration has
rate 1 and du/dλ is infinite. The implicit gradient gives that slope without another solve of the
equation. Newton's method with a sparse factorization by SciPy is the independent answer.
"""

import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse.linalg
import torch

from fixpoint import Broyden, FixedPoint, Implicit, Picard, solve

N, MIDDLE = 101, 50
k = torch.arange(1, N + 1, dtype=torch.float64)
sines = (2 / (N + 1)) ** 0.5 * torch.sin(torch.pi * torch.outer(k, k) / (N + 1))
eigenvalues = (2 * (N + 1) * torch.sin(torch.pi * k / (2 * (N + 1)))) ** 2
eigenvalues = eigenvalues[:, None] + eigenvalues


def inverse_laplacian(f: torch.Tensor) -> torch.Tensor:
    """Compute L^-1 f of fields (B, N, N), by sine transforms."""
    return sines @ ((sines @ f @ sines) / eigenvalues) @ sines


def bratu(lambda_: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the map phi of each sample's λ, (B,)."""
    return lambda u: inverse_laplacian(lambda_[:, None, None] * u.exp())


def sparse_newton(value: float) -> np.ndarray:
    """Solve by Newton's method with a sparse LU factorization, (N, N)."""
    second = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(N, N))
    L = (N + 1) ** 2 * scipy.sparse.kronsum(second, second, "csc")
    u = np.zeros(N * N)
    for _ in range(8):
        reaction = value * np.exp(u)
        slope = scipy.sparse.diags_array(reaction, format="csc")
        u -= scipy.sparse.linalg.spsolve(L - slope, L @ u - reaction)
    return u.reshape(N, N)


lambda_ = torch.tensor([0.5, 1.5, 3, 4, 5, 6, 6.5, 6.75], dtype=torch.float64, requires_grad=True)
phi, z0 = bratu(lambda_), torch.zeros(len(lambda_), N, N, dtype=torch.float64)
layer = FixedPoint(Broyden(rtol=1e-11), Implicit())
solve(phi, z0, layer.solver)  # its first call loads what it needs
begin = time.perf_counter()
solution = layer(phi, z0).check()
seconds = time.perf_counter() - begin
heights = solution.z[:, MIDDLE, MIDDLE]
(slopes,) = torch.autograd.grad(heights.sum(), lambda_)
plain = solve(phi, z0, Picard(rtol=1e-11, max_iter=1000))
print(f"Broyden: {solution.iterations.tolist()} updates, {seconds:.2f} s for all")
print(f"plain iteration: {plain.iterations.tolist()} updates")
begin = time.perf_counter()
apart = np.abs(sparse_newton(6.75) - solution.z[-1].detach().numpy()).max()
print(f"SciPy's sparse Newton: {time.perf_counter() - begin:.2f} s for one, {apart:.0e} away")
up, down = (solve(bratu(lambda_ + h), z0, layer.solver).z for h in (1e-5, -1e-5))
quotients = (up - down)[:, MIDDLE, MIDDLE] / 2e-5
print("du/dλ in the middle:", [round(slope, 4) for slope in slopes.tolist()])
print(f"difference quotients: at most {(slopes / quotients - 1).abs().max():.0e} away, relative")

# %%
# Left: u near the fold. Right: the middle of each sample with its slope, and the known fold.
_, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3), layout="constrained")
hottest = solution.z[-1].detach().numpy()
image = left.imshow(hottest, extent=(0, 1, 0, 1), origin="lower", cmap="inferno")
left.set(xlabel="x", ylabel="y", title=f"u at λ = {lambda_[-1]:g}")
plt.colorbar(image, ax=left)
for x, y, slope in zip(lambda_.tolist(), heights.tolist(), slopes.tolist(), strict=True):
    width = 0.5 / (1 + (4 * slope) ** 2) ** 0.5
    right.plot([x - width, x + width], [y - width * slope, y + width * slope], color="C1")
right.plot(lambda_.detach(), heights.detach(), "o", label="solutions")
right.plot([], [], color="C1", label="implicit slopes")
right.plot(6.808, 1.392, "k*", label="fold")
right.set(xlabel="λ", ylabel="u in the middle")
right.legend(fontsize="small", loc="upper left")
plt.show()
