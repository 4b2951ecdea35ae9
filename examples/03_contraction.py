"""
Plot the convergence condition
==============================

Train an ERNN and draw its convergence condition ||I + eta f'(h)|| < 1 over time.

Writes contraction.png and says in words where the condition fails.
"""

import torch

from fixpoint.analysis import diagnose, plots
from fixpoint.data import load_dataset, normalize
from fixpoint.models import ERNN, LastStateClassifier
from fixpoint.training import record_training

EPOCHS = 10
OUT = "contraction.png"

torch.manual_seed(0)
data = normalize(load_dataset("har2-sample"))
_, steps, channels = data.x_train.shape
layer = ERNN(channels, 32, rank=8, max_iter=2, timesteps=steps, batch_first=True)
model = LastStateClassifier(layer, 32, len(data.classes))
history = record_training(
    model, data.x_train, data.y_train, test=(data.x_test, data.y_test), epochs=EPOCHS
)
assert history.accuracy is not None
print(f"test accuracy {history.accuracy[-1]:.1f} % after {EPOCHS} epochs")
diagnosis = diagnose(model, data.x_test)
print(diagnosis)
plots.save(plots.diagnosis_figure(diagnosis), OUT)
print(f"drawn in {OUT}")
