"""
LASSO, and the slope of its weight
==================================

A signal of 200 numbers has 12 that are not zero, and 120 random sums of them are measured, with
noise: b = A z + noise. LASSO finds it from fewer measurements than unknowns::

    z*(λ) = argmin |A z - b|^2 / 2 + λ |z|_1 is the fixed point of a proximal step,
    phi(z) = soft(z - s A^T (A z - b), s λ), soft(v, w) = sign(v) max(|v| - w, 0).

How large should λ be? The error on 30 measurements that the fit has not seen depends on λ by way
of z*, and its slope is the hypergradient. The implicit gradient gives it from z* alone, so that
descent on log λ needs a few solves in place of a grid of them. How z* was found makes no
difference to it: here by Anderson's method, in a fraction of the updates of plain iteration.
"""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fixpoint import Anderson, FixedPoint, Implicit, Picard, solve

torch.manual_seed(1)
D, UNSEEN = 200, 30
A = torch.randn(120, D, dtype=torch.float64) / 120**0.5
signal = torch.zeros(D, dtype=torch.float64)
signal[torch.randperm(D)[:12]] = torch.tensor([1.0, -1.0] * 6).double() * (0.5 + torch.rand(12))
b = A @ signal + 0.1 * torch.randn(120, dtype=torch.float64)
A_fit, b_fit = A[UNSEEN:], b[UNSEEN:]
step = 1 / torch.linalg.matrix_norm(A_fit, 2) ** 2


def lasso(log_weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the map phi of each sample's log λ, (B, 1)."""
    width = step * log_weight.exp()

    def phi(z: Tensor) -> Tensor:
        moved = z - step * (z @ A_fit.T - b_fit) @ A_fit
        return moved - moved.clamp(-width, width)

    return phi


def error(z: Tensor) -> Tensor:
    """Compute the mean square error on the unseen measurements, (B,)."""
    return (z @ A[:UNSEEN].T - b[:UNSEEN]).square().mean(1)


layer = FixedPoint(Anderson(rtol=1e-10, memory=10, max_iter=1000), Implicit())
start = torch.tensor([[-0.7]], dtype=torch.float64, requires_grad=True)
phi, z0 = lasso(start), torch.zeros(1, D, dtype=torch.float64)
for solver in (Picard(rtol=1e-10, max_iter=10000), layer.solver):
    print(f"{type(solver).__name__}: {solve(phi, z0, solver).check().iterations.item()} updates")

path, z, log_weight = [], z0, start.detach().clone().requires_grad_()
for _ in range(12):  # each solve starts from the solution before
    solution = layer(lasso(log_weight), z).check()
    loss = error(solution.z)
    (slope,) = torch.autograd.grad(loss.sum(), log_weight)
    path.append((log_weight.exp().item(), loss.item(), slope.item()))
    z, log_weight.data = solution.z.detach(), log_weight.data - 20 * slope
for weight, mean_square, slope in (path[0], path[-1]):
    print(f"λ = {weight:.4f}: error {mean_square:.4f}, slope {slope:.0e}")

near = torch.tensor([[-0.7 + 1e-6], [-0.7 - 1e-6]], dtype=torch.float64)  # a batch of two weights
up, down = error(solve(lasso(near), z0.expand(2, D), layer.solver).z)
print(f"slope at the start: {path[0][2]:.7f}, by differences {(up - down) / 2e-6:.7f}")
grid = torch.linspace(-3.5, -0.7, 30, dtype=torch.float64)[:, None]
coarse = layer.solver.with_options(rtol=1e-6)
errors = error(solve(lasso(grid), z0.expand(30, D), coarse).check().z)
print(
    f"best of a grid of 30: λ = {grid[errors.argmin()].exp().item():.3f}, error {errors.min():.4f}"
)
_, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3), layout="constrained")
weights, losses, _ = zip(*path, strict=True)
left.plot(grid.exp(), errors, color="0.6", label="grid of 30")
left.plot(weights, losses, "o-", label="descent")
left.set(xlabel="λ", ylabel="mean square error, unseen")
left.legend()
for numbers, style, name in ((signal, "C0o", "signal"), (z[0], "C1x", "LASSO")):
    (places,) = numbers.nonzero(as_tuple=True)
    right.stem(
        places, numbers[places], linefmt=style[:2], markerfmt=style, basefmt="0.8", label=name
    )
right.set(xlabel="place", ylabel="amplitude")
right.legend()
plt.show()
