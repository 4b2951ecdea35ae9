"""
A Sinkhorn layer learns a cost from its plan
============================================

Forty sources and forty sinks in the plane, each of equal mass. The plan of entropic transport,
P_ij = exp((f_i + g_j - C_ij) / ε), has the right sums where its potentials are a fixed point::

    f = phi(f): g_j = -ε logsumexp_i((f_i - C_ij) / ε), f_i = -ε logsumexp_j((g_j - C_ij) / ε),

up to a constant, which phi removes: I - J must be regular. A plan was observed under the cost
C_ij = w_1 (x_i - x_j)^2 + w_2 (y_i - y_j)^2 with w = (2, 0.5), and w is sought from the plan alone.
That takes the gradient of a plan: unrolled, it stores every update, and implicit it stores one.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fixpoint import Anderson, FixedPoint, Implicit, Picard, Unrolled

torch.manual_seed(0)
M, EPSILON = 40, 0.01
sources, sinks = torch.rand(2, M, 2, dtype=torch.float64)
squares = (sources[:, None] - sinks).square()
true = torch.tensor([2.0, 0.5], dtype=torch.float64)


def potentials(f: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Update f and g, (B, M) each, as Sinkhorn does; f has mean 0."""
    g = -EPSILON * torch.logsumexp((f[:, :, None] - C) / EPSILON, 1)
    f = -EPSILON * torch.logsumexp((g[:, None] - C) / EPSILON, 2)
    return f - f.mean(1, keepdim=True), g


def plan(w: Tensor, layer: FixedPoint) -> Tensor:
    """Compute the plan under the cost of weights w, (M, M): rows and columns sum to 1."""
    C = squares @ w
    f = layer(lambda f: potentials(f, C)[0], torch.zeros(1, M, dtype=torch.float64)).check().z
    _, g = potentials(f, C)
    return torch.exp((f[0, :, None] + g[0] - C) / EPSILON)


def gradient(layer: FixedPoint, w: Tensor) -> Tensor:
    return torch.autograd.grad((plan(w, layer) - observed).square().sum(), w)[0]


layer = FixedPoint(Anderson(rtol=1e-11, max_iter=1000), Implicit())
observed = plan(true, layer)
w = torch.ones(2, dtype=torch.float64, requires_grad=True)
exact = gradient(layer, w)
steps, errors = (1, 3, 10, 30, 100, 300), []
for count in steps:
    unrolled = FixedPoint(Picard(rtol=0, atol=0, max_iter=count), Unrolled())
    errors.append(((gradient(unrolled, w) - exact).norm() / exact.norm()).item())
h = torch.tensor([1e-6, 0], dtype=torch.float64)
up, down = ((plan(w + sign * h, layer) - observed).square().sum() for sign in (1, -1))
print(f"implicit gradient: {exact.tolist()}, first by differences {((up - down) / 2e-6).item()}")
print(f"unrolled: {errors[2]:.0e} away after 10 updates, {errors[-1]:.0e} after 300")
optimizer = torch.optim.LBFGS([w], max_iter=40, line_search_fn="strong_wolfe")


def loss() -> Tensor:
    optimizer.zero_grad()
    value = (plan(w, layer) - observed).square().sum()
    value.backward()
    path.append(w.tolist())
    return value


path: list[list[float]] = []
optimizer.step(loss)
print(f"w = {w.tolist()}, {(w - true).abs().max().item():.0e} away, {len(path)} gradients")

# %%
# Left: the plan, each line as dark as the mass that it carries. Right: the error of a gradient
# through this many updates, which stores the states of them all.
_, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.2), layout="constrained")
for i in range(M):
    for j in range(M):
        if (mass := observed[i, j].item()) > 0.02:
            left.plot(*zip(sources[i], sinks[j], strict=True), color="0.3", alpha=min(1, mass))
left.plot(*sources.T, "o", label="sources")
left.plot(*sinks.T, "s", label="sinks")
left.set(xlabel="x", ylabel="y", title="observed plan", aspect="equal")
left.legend(loc="upper left", bbox_to_anchor=(1, 1))
right.loglog(steps, errors, "o-")
right.set(xlabel="updates unrolled", ylabel="relative error of the gradient")
plt.show()
