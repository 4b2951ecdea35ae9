"""
Compare solvers on HAR-2
========================

Solvers on the equilibria of a trained layer.

An ERNN with the self-feedback map is trained on the bundled HAR-2 windows; then each solver finds
the same hidden states, to the same tolerance.
"""

import matplotlib.pyplot as plt
import torch

from fixpoint import SOLVERS, Anderson, Implicit, make_solver
from fixpoint.analysis import plots, residual_curves
from fixpoint.data import load_dataset, normalize
from fixpoint.models import ERNN, LastStateClassifier, SelfFeedbackMap
from fixpoint.training import record_training

EPOCHS = 5
NAMES = ("picard", "barzilai-borwein", "anderson", "broyden", "newton")

torch.manual_seed(0)
data = normalize(load_dataset("har2-sample"))
x_train, x_test = data.x_train[:, ::8], data.x_test[:, ::8]  # 16 of the 128 steps
own = SelfFeedbackMap(9, 32, bound=0.9)
layer = ERNN(9, 32, map=own, solver=Anderson(rtol=1e-3), backward=Implicit(), batch_first=True)
model = LastStateClassifier(layer, 32, len(data.classes))
test = (x_test, data.y_test)
history = record_training(model, x_train, data.y_train, test=test, epochs=EPOCHS, lr=3e-3)
assert history.accuracy is not None
print(f"test accuracy {history.accuracy[-1]:.1f} %")

# %%
# Every solver on the trained weights, all 16 time steps.
for name in NAMES:
    solver = make_solver(name, rtol=1e-5, atol=0.0, max_iter=200)
    tried = ERNN(9, 32, map=own, solver=solver, backward=Implicit(), batch_first=True).eval()
    with torch.no_grad():
        path = tried.trajectory(x_test[:64])
    solved, updates = (path.result == 0).double().mean(), path.iterations.double().mean()
    print(f"{name:17} {updates:5.1f} updates a step, {100 * solved:.1f} % solved")

# %%
# The last time step alone, in float64: residual against evaluations.
own = own.eval().double()
x = x_test[:64].transpose(0, 1).double()
with torch.no_grad():
    phi = own.bind(x)(15, path.output[:, 14].double())
    curves = residual_curves(phi, torch.zeros(64, 32).double(), {n: SOLVERS[n]() for n in NAMES})
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
plots.plot_residual_curves(curves, axes)
plt.show()
