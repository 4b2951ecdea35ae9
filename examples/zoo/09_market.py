"""
A market, and the tax that reaches a goal
=========================================

Sixty traders own five goods and buy with the elasticity of substitution σ. Walras' crier raises the
price of what is in demand and lowers that of what is not, until the markets are clear::

    z = phi(z) = z + log demand(p) - log supply,   z = log p.

Demand does not change where all prices double, so p_1 = 1, and the market of good 1 clears when the
others do: four equations, four prices. A tax τ on wealth is paid out in equal parts. Which τ makes
the real income of the poorest tenth six times as large? They like good 2, so that its price rises
with τ. Newton's method for τ needs dp/dτ, the implicit gradient at the equilibrium. With σ = 1 the
prices solve a linear system, which checks both the prices and their slopes.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fixpoint import Anderson, FixedPoint

torch.manual_seed(0)
TRADERS, GOODS = 60, 5
size = torch.logspace(-1, 1, TRADERS, dtype=torch.float64)[:, None]
owned = size * torch.rand(TRADERS, GOODS, dtype=torch.float64) ** 2
logits = torch.randn(TRADERS, GOODS, dtype=torch.float64)
logits[:30, 1] += 3  # the poor buy good 2
taste, poorest = torch.softmax(logits, 1), slice(0, 6)
layer = FixedPoint(Anderson(rtol=1e-12))


def prices(z: Tensor) -> Tensor:
    """Compute prices, (B, 5), from the logarithms of the last four."""
    return torch.cat([torch.zeros_like(z[:, :1]), z], 1).exp()


def incomes(p: Tensor, tax: Tensor) -> Tensor:
    """Compute what each trader can spend, (B, 60), with a tax (B, 1)."""
    return p @ owned.T * (1 - tax) + tax * (p @ owned.mean(0))[:, None]


def phi(z: Tensor, tax: Tensor, sigma: float) -> Tensor:
    """Update the logarithms of prices, (B, 4), as the crier does."""
    p = prices(z)
    wished = taste * p[:, None] ** -sigma
    wished = wished / (wished * p[:, None]).sum(2, keepdim=True)
    demand = (wished * incomes(p, tax)[:, :, None]).sum(1)
    return z + (demand / owned.sum(0)).log()[:, 1:]


def equilibrium(tax: Tensor, sigma: float) -> Tensor:
    """Find the prices (B, 5) that clear the market, with their gradient in the tax (B, 1)."""
    z0 = torch.zeros(len(tax), GOODS - 1, dtype=torch.float64)
    return prices(layer(lambda z: phi(z, tax, sigma), z0).check().z)


def closed_form(tax: Tensor) -> Tensor:
    """Solve for prices with σ = 1: spending is linear in p, (S - E) p = 0 with p_1 = 1."""
    shared = (1 - tax) * owned + tax * owned.mean(0)
    matrix = torch.diag(owned.sum(0)) - taste.T @ shared
    return torch.cat([torch.ones(1), -torch.linalg.solve(matrix[1:, 1:], matrix[1:, 0])])


def real_income(tax: Tensor, sigma: float) -> Tensor:
    """Compute, of the poorest tenth, mean income over the price of what they like, (B,)."""
    p = equilibrium(tax, sigma)
    return incomes(p, tax)[:, poorest].mean(1) / (p @ taste[poorest].mean(0))


tax = torch.tensor([[0.1]], dtype=torch.float64, requires_grad=True)
found, exact = equilibrium(tax, 1.0)[0], closed_form(tax[0, 0])
print(f"sigma = 1: prices at most {(found - exact).abs().max():.0e} from their closed form")
slopes = [torch.autograd.grad(p[4], tax)[0].item() for p in (found, exact)]
print(f"dp_5/dτ = {slopes[0]:.10f}, by the closed form {slopes[1]:.10f}")

SIGMA = 0.5
goal, path = 6 * real_income(torch.zeros_like(tax), SIGMA).item(), []
for _ in range(5):
    income = real_income(tax, SIGMA)
    (slope,) = torch.autograd.grad(income.sum(), tax)
    path.append((tax.item(), income.item()))
    tax.data += (goal - income.detach()) / slope
print("τ by Newton's method:", ", ".join(f"{step[0]:.6f}" for step in path))
print(f"real income of the poorest: {goal / 6:.4f} without tax, {path[-1][1]:.4f} with it")

# %%
# All taxes of the figure are one batch of 41 markets.
taxes = torch.linspace(0, 0.5, 41, dtype=torch.float64)[:, None]
_, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3), layout="constrained")
left.plot(100 * taxes, equilibrium(taxes, SIGMA), label=[f"good {i + 1}" for i in range(GOODS)])
left.set(xlabel="tax τ (%)", ylabel="price (good 1 = 1)")
left.legend(loc="upper left", fontsize="small")
right.plot(100 * taxes, real_income(taxes, SIGMA), color="0.6", label="poorest tenth")
right.plot([100 * x for x, _ in path], [y for _, y in path], "o-", label="Newton's steps")
right.axhline(goal, color="k", linestyle=":", label="goal")
right.set(xlabel="tax τ (%)", ylabel="real income (baskets)")
right.legend()
plt.show()
