"""
Inexact Newton with learned steps
=================================

Two learned steps towards the root of f(z) = phi(z) - z, as in ERNN.

The steps are parameters: gradient descent finds the two that come nearest to the equilibrium, for
a map whose plain iteration diverges.
"""

import matplotlib.pyplot as plt
import torch

from fixpoint import FixedPoint, InexactNewton, Picard, Unrolled, solve

torch.manual_seed(0)
W = torch.randn(8, 8)
W = -2.0 * W @ W.T / torch.linalg.matrix_norm(W, 2) ** 2  # eigenvalues from -2 to 0


def phi_of(x: torch.Tensor):  # type: ignore[no-untyped-def]
    """Return the map z -> W z + x, whose plain iteration diverges."""
    return lambda z: z @ W.T + x


# %%
# A fixed number of updates, differentiable in the steps eta.
layer = FixedPoint(InexactNewton(max_iter=2), Unrolled())
layer.solver.eta.data = torch.tensor([0.2, 0.6])  # equal steps would remain equal
optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
for _ in range(300):
    x = torch.randn(64, 8)
    z = layer(phi_of(x), torch.zeros_like(x)).z
    loss = (phi_of(x)(z) - z).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"learned eta: {layer.solver.eta.tolist()}")

# %%
# Compared with plain and damped iteration of the same number of updates.
x = torch.randn(1000, 8)
equilibrium = torch.linalg.solve(torch.eye(8) - W, x.T).T
for name, solver in (
    ("plain", Picard(max_iter=2, rtol=0, atol=0)),
    ("damped", Picard(max_iter=2, beta=0.5, rtol=0, atol=0)),
    ("learned", layer.solver),
):
    error = (solve(phi_of(x), torch.zeros_like(x), solver).z - equilibrium).norm()
    print(f"{name:8} error after two updates: {error / equilibrium.norm():.3f}")

# %%
# In the direction of an eigenvalue w of W, an update multiplies the error by 1 - eta (1 - w).
w = torch.linspace(-2, 0, 100)
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
for name, eta in (
    ("plain", (1, 1)),
    ("damped", (0.5, 0.5)),
    ("learned", layer.solver.eta.detach()),
):
    axes.plot(w, ((1 - eta[0] * (1 - w)) * (1 - eta[1] * (1 - w))).abs(), label=name)
axes.set(xlabel="eigenvalue of W", ylabel="error after two updates", yscale="log", ylim=(1e-3, 10))
axes.legend()
plt.show()
