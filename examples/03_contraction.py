"""
Plot the convergence condition
==============================

Train an ERNN, draw its convergence condition, ``python examples/03_contraction.py --epochs 10``.

Writes contraction.png and says in words where ||I + eta f'(h)|| < 1 fails.
"""

import argparse
from pathlib import Path

import torch

from fixpoint.analysis import diagnose, plots
from fixpoint.data import load_dataset, normalize
from fixpoint.models import ERNN, LastStateClassifier
from fixpoint.training import record_training

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--out", type=Path, default=Path("contraction.png"))
options = parser.parse_args()
torch.manual_seed(0)
data = normalize(load_dataset("har2-sample"))
_, steps, channels = data.x_train.shape
layer = ERNN(channels, 32, rank=8, max_iter=2, timesteps=steps, batch_first=True)
model = LastStateClassifier(layer, 32, len(data.classes))
history = record_training(
    model, data.x_train, data.y_train, test=(data.x_test, data.y_test), epochs=options.epochs
)
assert history.accuracy is not None
print(f"test accuracy {history.accuracy[-1]:.1f} % after {options.epochs} epochs")
diagnosis = diagnose(model, data.x_test)
print(diagnosis)
plots.save(plots.diagnosis_figure(diagnosis), options.out)
print(f"drawn in {options.out}")
