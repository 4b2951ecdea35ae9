"""
A solution by SciPy, differentiated
===================================

A cable of 21 springs hangs between two hooks under its own weight: its 20 masses are at rest where
the energy ::

    E(z) = sum_k stiffness (length_k(z) - rest_k)^2 / 2 + weight sum_k height_k(z)

has its minimum. SciPy finds it, and no gradient passes through SciPy. But z* is a root of the force
dE/dz, and `attach_gradient` gives it the slopes that it has as such: of each position with respect
to each rest length. So the cable can be cut to a shape. With equal lengths it is a catenary; here
the masses have to hang at equal distances in x, as the deck of a bridge does, with a given sag.
Newton's method finds the rest lengths by a few solves of SciPy and their attached slopes. Such a
cable is a parabola, whose positions and rest lengths have a closed form to compare with.
"""

import matplotlib.pyplot as plt
import scipy.optimize
import torch
from torch import Tensor

from fixpoint import attach_gradient

M, STIFFNESS, WEIGHT = 20, 50.0, 0.1
HOOKS = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)


def shape(z: Tensor) -> Tensor:
    """List the positions of all points, hooks included, (M + 2, 2), of z, (2 M,)."""
    return torch.cat([HOOKS[:1], z.view(M, 2), HOOKS[1:]])


def energy(z: Tensor, rest: Tensor) -> Tensor:
    """Compute E in joules of z, (2 M,) in meters, and rest lengths (M + 1,)."""
    length = shape(z).diff(dim=0).norm(dim=1)
    return STIFFNESS * (length - rest).square().sum() / 2 + WEIGHT * z[1::2].sum()


def hang(rest: Tensor, start: Tensor) -> Tensor:
    """Find z at rest, (2 M,), by SciPy, with the gradient of a root of the force."""
    force = torch.func.grad(lambda z: energy(z, rest))
    found = scipy.optimize.minimize(
        lambda z: energy(torch.from_numpy(z), rest).item(),
        start.detach().numpy(),
        jac=lambda z: force(torch.from_numpy(z)).detach().numpy(),
        hess=lambda z: torch.func.jacrev(force)(torch.from_numpy(z)).detach().numpy(),
        method="trust-exact",
        options={"gtol": 1e-10, "maxiter": 500},
    )
    return attach_gradient(force, torch.from_numpy(found.x), form="root", batched=False)


x = torch.linspace(0, 1, M + 2, dtype=torch.float64)[1:-1]
start = torch.stack([x, -1.5 * x * (1 - x)], 1).flatten()
rest = torch.full((M + 1,), 1.3 / (M + 1), dtype=torch.float64, requires_grad=True)
z = first = hang(rest, start)
(slopes,) = torch.autograd.grad(z[21], rest)
h = 1e-5 * torch.eye(M + 1, dtype=torch.float64)[3]
quotient = (hang(rest + h, start) - hang(rest - h, start))[21] / 2e-5
print(f"d height_11 / d rest_4 = {slopes[3]:.8f}, by differences {quotient:.8f}")

SAG = 0.4
goal = torch.cat([x, -4 * SAG * x[9:10] * (1 - x[9:10])])  # distances, and a height in the middle
for step in range(4):
    z = hang(rest, z.detach())
    missed = torch.cat([z[0::2], z[19:20]]) - goal
    print(f"step {step}: positions at most {1e3 * missed.abs().max():.6f} mm from the goal")
    (slopes,) = torch.autograd.grad(missed, rest, torch.eye(M + 1).double(), is_grads_batched=True)
    with torch.no_grad():
        rest -= torch.linalg.solve(slopes, missed)

parabola = torch.stack([x, -4 * SAG * x * (1 - x)], 1).flatten()
tension = WEIGHT / (8 * SAG / (M + 1) ** 2)  # tension of a spring by its length
exact = shape(parabola).diff(dim=0).norm(dim=1) * (1 - tension / STIFFNESS)
print(
    f"closed form: positions at most {(z - parabola).abs().max():.0e} m away, "
    f"rest lengths {(rest - exact).abs().max():.0e} m"
)
_, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3), layout="constrained")
for points, style, name in ((first, "o-", "equal lengths"), (z, "s-", "cut to the goal")):
    left.plot(*shape(points.detach()).T, style, markersize=4, label=name)
left.plot(*shape(parabola).T, "k:", label="parabola")
left.set(xlabel="x (m)", ylabel="height (m)")
left.legend()
right.plot(range(1, M + 2), 1e3 * exact, "k:", label="closed form")
right.plot(range(1, M + 2), 1e3 * rest.detach(), "s", color="C1", label="found")
right.set(xlabel="spring", ylabel="rest length (mm)")
right.legend()
plt.show()
