"""
Tune a tolerance
================

The cost of a tolerance and the error it leaves, in the state and in the gradient, for a slow map.

The residual is not the error: with a rate r the error may be larger by 1 / (1 - r), here by 50.
"""

import matplotlib.pyplot as plt
import torch

from fixpoint import Anderson, FixedPoint, Implicit

torch.manual_seed(0)
U = torch.randn(30, 30, dtype=torch.float64)
U = (0.98 * (U + U.T) / torch.linalg.matrix_norm(U + U.T, 2)).requires_grad_()
x = torch.randn(16, 30, dtype=torch.float64)
z0 = torch.zeros_like(x)


def solve_to(rtol: float) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return z*, dL/dU and the evaluations of the forward solve."""
    layer = FixedPoint(Anderson(rtol=rtol, atol=0.0, max_iter=200), Implicit())
    solution = layer(lambda z: 0.2 * torch.tanh(z) + 0.8 * (z @ U.T) + x, z0).check()
    (gradient,) = torch.autograd.grad(solution.z.square().sum(), U)
    return solution.z.detach(), gradient, solution.evaluations


z, gradient, _ = solve_to(1e-13)
print("rtol    evaluations  error of z  error of dL/dU")
tolerances = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)
rows = []
for rtol in tolerances:
    state, slope, evaluations = solve_to(rtol)
    errors = (state - z).norm() / z.norm(), (slope - gradient).norm() / gradient.norm()
    print(f"{rtol:.0e}  {evaluations:11}  {errors[0]:10.0e}  {errors[1]:14.0e}")
    rows.append([error.item() for error in errors])
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.loglog(tolerances, rows, "o-", label=["error of z", "error of dL/dU"])
axes.loglog(tolerances, tolerances, "--", color="grey", label="rtol")
axes.set(xlabel="rtol", ylabel="relative error")
axes.legend()
plt.show()
