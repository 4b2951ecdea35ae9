"""
Fixed points in ten minutes
===========================

One map of one number, three solvers, one iteration that fails, and a gradient.
"""

# %%
# **A fixed point.** Press *cos* on a calculator again and again: the display settles at .739, the
# number with cos(z) = z. In the cobweb each step goes to the graph, then back to the diagonal.
import matplotlib.pyplot as plt
import torch

from fixpoint import Anderson, FixedPoint, Implicit, Newton, Picard, Result, solve
from fixpoint.analysis import plots, residual_curves, trajectories

start = torch.zeros(1, 1, dtype=torch.float64)  # one sample of one number
solution = solve(torch.cos, start, Picard(rtol=1e-10))
print(f"z* = {solution.z.item():.6f} after {solution.evaluations} evaluations of cos")
_, axes = plt.subplots(figsize=(4, 4), layout="constrained")
plots.plot_cobweb(torch.cos, trajectories(torch.cos, start, Picard()), axes)
plt.show()

# %%
# **Speed.** Near z* plain iteration multiplies the error by cos'(z*) = -.67 each time, so a digit
# takes six evaluations. Anderson's method combines the last states; Newton's uses the derivative
# and doubles the digits with each step.
solvers = {"picard": Picard(), "anderson": Anderson(), "newton": Newton()}
curves = residual_curves(torch.cos, start, solvers)
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
plots.plot_residual_curves(curves, axes)
plt.show()


# %%
# **Failure.** phi(z) = 2 - 1.5 z has the fixed point .8, but its slope there is -1.5: each step
# moves away. The result says so; the best state found is returned.
def steep(z: torch.Tensor) -> torch.Tensor:
    return 2 - 1.5 * z


failed = solve(steep, start + 0.7, Picard(max_iter=8))
print(f"{Result(failed.result.item()).name}: z = {failed.z.item():.2f}")
_, axes = plt.subplots(figsize=(4, 4), layout="constrained")
plots.plot_cobweb(steep, trajectories(steep, start + 0.7, Picard(), max_iter=8), axes, box=(0, 2))
plt.show()

# %%
# **The cure.** A damped step z + beta (phi(z) - z) has the slope 1 - beta + beta (-1.5): with
# beta = .4 it is 0, and one step is enough. Anderson and Newton need no such choice.
for name, solver in (("damped", Picard(beta=0.4)), ("anderson", Anderson()), ("newton", Newton())):
    cured = solve(steep, start + 0.7, solver).check()
    print(f"{name:8} z* = {cured.z.item():.4f}, {cured.iterations.item()} updates")

# %%
# **A gradient.** z* = cos(a z*) depends on a, whatever solver found it. The implicit function
# theorem gives dz*/da = -z* sin(a z*) / (1 + a sin(a z*)) without going back through the steps.
a = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
z = FixedPoint(Anderson(rtol=1e-10), Implicit())(lambda z: torch.cos(a * z), start).check().z
z.sum().backward()
by_hand = -z * torch.sin(a * z) / (1 + a * torch.sin(a * z))
print(f"dz*/da = {a.grad.item():.6f}, by hand {by_hand.item():.6f}")  # type: ignore[union-attr]
