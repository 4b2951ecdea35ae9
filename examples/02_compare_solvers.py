"""
Compare solvers on HAR-2
========================

Solvers on the equilibria of a trained layer, ``python examples/02_compare_solvers.py --epochs 5``.

An ERNN with the self-feedback cell is trained on the bundled HAR-2 windows; then each solver finds
the same hidden states, to the same tolerance.
"""

import argparse
import time

import torch

from fixpoint import Anderson, FixedPoint, Implicit, make_solver
from fixpoint.data import load_dataset, normalize
from fixpoint.models import ERNN, LastStateClassifier, SelfFeedbackMap
from fixpoint.models.rnn.scan import scan
from fixpoint.training import record_training

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()
torch.manual_seed(0)
data = normalize(load_dataset("har2-sample"))
x_train, x_test = data.x_train[:, ::8], data.x_test[:, ::8]  # 16 of the 128 steps
cell = SelfFeedbackMap(9, 32, bound=0.9)
solver = Anderson(rtol=1e-3)
layer = ERNN(9, 32, cell=cell, solver=solver, backward=Implicit(), batch_first=True)
model = LastStateClassifier(layer, 32, len(data.classes))
test = (x_test, data.y_test)
history = record_training(model, x_train, data.y_train, test=test, epochs=options.epochs, lr=3e-3)
assert history.accuracy is not None
print(f"test accuracy {history.accuracy[-1]:.1f} %")
x = x_test[:64].transpose(0, 1)
for name in ("picard", "barzilai-borwein", "anderson", "broyden", "newton"):
    solver = make_solver(name, rtol=1e-5, atol=0.0, max_iter=200)
    start = time.perf_counter()
    with torch.no_grad():
        path = scan(cell.eval(), FixedPoint(solver, Implicit()), x)
    seconds = time.perf_counter() - start
    solved = (path.result == 0).double().mean()
    updates = path.iterations.double().mean()
    print(f"{name:17} {updates:5.1f} updates a step, {100 * solved:.1f} % solved, {seconds:.2f} s")
