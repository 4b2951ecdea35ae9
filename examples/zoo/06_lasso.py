"""
LASSO, and the slope of its weight
==================================

A seismic trace b is a train of spikes z seen through a wavelet, b = A z + noise. LASSO finds them:

    z*(λ) = argmin |A z - b|^2 / 2 + λ |z|_1 is the fixed point of a proximal step,
    phi(z) = soft(z - s A^T (A z - b), s λ), soft(v, w) = sign(v) max(|v| - w, 0).

How large should λ be? The error on those samples of the trace that the fit has not seen depends on
λ by way of z*, and its slope is the hypergradient. The implicit gradient gives it from z* alone, so
that descent on log λ needs a few solves in place of a grid of them. It also makes no difference to
it how z* was found: here by Anderson's method, in a third of the updates of plain iteration.
"""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fixpoint import Anderson, FixedPoint, Implicit, Picard, solve

torch.manual_seed(1)
D = 200
time = torch.arange(-20, 21, dtype=torch.float64) / 4
wavelet = torch.nn.functional.pad((1 - time**2) * torch.exp(-(time**2) / 2), (0, D - 41))
A = torch.stack([wavelet.roll(i - 20) for i in range(D)], 1)
spikes = torch.zeros_like(wavelet)
spikes[torch.randperm(D)[:12]] = torch.tensor([1.0, -1.0] * 6).double() * (0.5 + torch.rand(12))
b = A @ spikes + 0.2 * torch.randn_like(spikes)
unseen = torch.rand(D) < 0.3
A_fit, b_fit = A[~unseen], b[~unseen]
step = 1 / torch.linalg.matrix_norm(A_fit, 2) ** 2


def lasso(log_weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The map phi of each sample's log λ, (B, 1)."""
    width = step * log_weight.exp()

    def phi(z: Tensor) -> Tensor:
        moved = z - step * (z @ A_fit.T - b_fit) @ A_fit
        return moved - moved.clamp(-width, width)

    return phi


def error(z: Tensor) -> Tensor:
    """Mean square error on the samples that the fit has not seen, (B,)."""
    return (z @ A[unseen].T - b[unseen]).square().mean(1)


layer = FixedPoint(Anderson(rtol=1e-10, memory=10, max_iter=5000), Implicit())
log_weight = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
phi, z0 = lasso(log_weight), torch.zeros(1, D, dtype=torch.float64)
for solver in (Picard(rtol=1e-10, max_iter=50000), layer.solver):
    print(f"{type(solver).__name__}: {solve(phi, z0, solver).check().iterations.item()} updates")

path, z = [], z0
for _ in range(12):  # each solve starts from the solution before
    solution = layer(lasso(log_weight), z).check()
    loss = error(solution.z)
    (slope,) = torch.autograd.grad(loss.sum(), log_weight)
    path.append((log_weight.exp().item(), loss.item(), slope.item()))
    z, log_weight.data = solution.z.detach(), log_weight.data - 10 * slope
print(f"λ from {path[0][0]:.2f} to {path[-1][0]:.3f}: error {path[0][1]:.4f}, {path[-1][1]:.4f}, slope {path[-1][2]:.0e}")

up, down = (error(solve(lasso(torch.tensor([[0.5 + h]]).double()), z0, layer.solver).z) for h in (1e-6, -1e-6))
print(f"hypergradient at λ = {path[0][0]:.2f}: {path[0][2]:.8f}, by differences {((up-down)/2e-6).item():.8f}")
grid = torch.linspace(-4.5, 0.6, 60, dtype=torch.float64)[:, None]
errors = error(solve(lasso(grid), z0.expand(60, D), layer.solver).check().z)
print(f"best of a grid of 60: λ = {grid[errors.argmin()].exp().item():.3f}, error {errors.min():.4f}")
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.plot(grid.exp(), errors, color="0.6", label="grid of 60")
left.plot(*zip(*[p[:2] for p in path], strict=True), "o-", label="descent")
left.set(xscale="log", xlabel="λ", ylabel="mean square error, unseen samples")
left.legend()
right.plot(b, color="0.7", label="trace b")
right.stem(spikes, linefmt="C0-", markerfmt="C0o", basefmt=" ", label="true spikes")
right.stem(z[0], linefmt="C1-", markerfmt="C1x", basefmt=" ", label="LASSO")
right.set(xlabel="sample", ylabel="amplitude")
right.legend()
plt.show()
