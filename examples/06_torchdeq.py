"""
Solvers to and from torchdeq
============================

fixpoint's Anderson drives a torchdeq model, and torchdeq's Broyden a fixpoint layer; both find the
same equilibrium and the same gradient.
"""

import matplotlib.pyplot as plt
import torch
import torchdeq

from fixpoint import Anderson, FixedPoint, Implicit, TorchDEQSolver, register_torchdeq, solve

torch.manual_seed(0)
U = (torch.randn(16, 16, dtype=torch.float64) / 8).requires_grad_()
x = torch.randn(8, 16, dtype=torch.float64)
z0 = torch.zeros(8, 16, dtype=torch.float64)


def phi(z: torch.Tensor) -> torch.Tensor:
    return torch.tanh(z @ U.T + x)


register_torchdeq()
deq = torchdeq.get_deq(
    f_solver="fixpoint-anderson", b_solver="fixpoint-anderson", f_tol=1e-10, b_tol=1e-10, ift=True
)
(z,), report = deq(phi, z0)
(ours_in_theirs,) = torch.autograd.grad(z.square().sum(), U)
print(f"fixpoint-anderson inside torchdeq: {int(report['nstep'].max())} steps")

layer = FixedPoint(TorchDEQSolver("broyden", rtol=1e-10, atol=0.0), Implicit())
solution = layer(phi, z0).check()
(theirs_in_ours,) = torch.autograd.grad(solution.z.square().sum(), U)
print(f"torchdeq's broyden inside fixpoint: {int(solution.iterations.max())} steps")

apart = (z - solution.z).abs().max()
slopes = (ours_in_theirs - theirs_in_ours).norm() / theirs_in_ours.norm()
print(f"states differ by {apart:.0e}, gradients by {slopes:.0e} of their norm")

# %%
# The same tolerances, the evaluations of both.
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
tolerances = [10.0**-k for k in range(1, 11)]
for name, make in (
    ("fixpoint", Anderson),
    ("torchdeq", lambda **o: TorchDEQSolver("anderson", **o)),
):
    work = [solve(phi, z0, make(rtol=rtol, atol=0.0)).evaluations for rtol in tolerances]
    axes.plot(tolerances, work, "o-", label=f"Anderson of {name}")
axes.set(xscale="log", xlabel="rtol", ylabel="evaluations of phi")
axes.legend()
plt.show()
