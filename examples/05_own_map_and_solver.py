"""
Your own map and solver
=======================

The map is Bellman's: the value of ten places on a line, reward 1 at the right end. The solver is a
heavy ball, which remembers its last step. Both get stopping, results and gradients from fixpoint.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fixpoint import FixedPoint, Implicit, IterativeSolver, Picard, solve


class HeavyBall(IterativeSolver):
    """The heavy ball method, z <- phi(z) + momentum (z - z_before)."""

    def __init__(self, *, momentum: float = 0.3, **options: float) -> None:
        super().__init__(**options)
        self.momentum = momentum

    def init(self, z: Tensor, t: int | None) -> Tensor:
        return z

    def update(self, k: int, z: Tensor, fz: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return fz + self.momentum * (z - state), z


def bellman(v: Tensor, discount: Tensor) -> Tensor:
    """Update the values, (B, 10), by the better of left and right, smoothly."""
    left = torch.cat([v[:, :1], v[:, :-1]], 1)
    right = torch.cat([v[:, 1:], v[:, -1:]], 1)
    reward = torch.zeros_like(v)
    reward[:, -1] = 1
    moves = torch.stack([discount * left, reward + discount * right], -1)
    return torch.logsumexp(20 * moves, -1) / 20


discount = torch.tensor([[0.9], [0.95]], dtype=torch.float64, requires_grad=True)
start = torch.zeros(2, 10, dtype=torch.float64)
for solver in (
    Picard(rtol=1e-10, max_iter=1000),
    HeavyBall(rtol=1e-10, max_iter=1000),
):
    solution = solve(lambda v: bellman(v, discount), start, solver).check()
    print(f"{type(solver).__name__}: {solution.iterations.tolist()} updates")

solution = FixedPoint(solver, Implicit())(lambda v: bellman(v, discount), start)
solution.z[:, 0].sum().backward()
print("value of the left end:", solution.z[:, 0].tolist())
print("its slope in the discount:", discount.grad.flatten().tolist())
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
for discounted, values in zip(discount.flatten().tolist(), solution.z.detach(), strict=True):
    axes.plot(range(1, 11), values, "o-", label=f"discount {discounted:g}")
axes.set(xlabel="place", ylabel="value")
axes.legend()
plt.show()
