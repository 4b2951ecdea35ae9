"""
Check gradients
===============

The gradient at an equilibrium against finite differences, against long unrolling, and twice.

Do this once for each map that a result rests on.
"""

import matplotlib.pyplot as plt
import torch
from torch.autograd import gradcheck, gradgradcheck

from fixpoint import Anderson, FixedPoint, Implicit, Phantom, Picard, Unrolled
from fixpoint.analysis import gradient_error, plots

torch.manual_seed(0)
U = torch.randn(4, 4, dtype=torch.float64)
U = (0.6 * U / torch.linalg.matrix_norm(U, 2)).requires_grad_()
x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
z0 = torch.zeros(3, 4, dtype=torch.float64)


def equilibrium(layer: FixedPoint, U: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Solve z = tanh(z U^T + x)."""
    return layer(lambda z: torch.tanh(z @ U.T + x), z0).z


# %%
# Finite differences: float64, and a tolerance well below their step.
exact = FixedPoint(Anderson(rtol=1e-13, atol=0.0), Implicit())
assert gradcheck(lambda U, x: equilibrium(exact, U, x), (U, x))
assert gradgradcheck(lambda U, x: equilibrium(exact, U, x), (U, x))
print("gradcheck and gradgradcheck pass")

# %%
# Each backward against the implicit gradient.
(reference,) = torch.autograd.grad(equilibrium(exact, U, x).square().sum(), U)
for name, layer in (
    ("unrolled, 60 updates", FixedPoint(Picard(max_iter=60, rtol=0, atol=0), Unrolled())),
    ("implicit, rtol 1e-3", FixedPoint(Anderson(rtol=1e-3), Implicit())),
    ("phantom, 1 step", FixedPoint(Anderson(rtol=1e-10), Phantom(1))),
    ("phantom, 5 steps", FixedPoint(Anderson(rtol=1e-10), Phantom(5))),
):
    (gradient,) = torch.autograd.grad(equilibrium(layer, U, x).square().sum(), U)
    print(f"{name:22} relative error {(gradient - reference).norm() / reference.norm():.0e}")

# %%
# Over the number of updates, and over the tolerance.
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
error = gradient_error(lambda z: torch.tanh(z @ U.T + x.detach()), z0, [U])
plots.plot_gradient_error(error, axes)
plt.show()
