"""
ERNN in the place of torch.nn.RNN
=================================

The paper's toy task: which of two step sizes made a random walk of 100 steps?
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from fixpoint import InexactNewton
from fixpoint.analysis import plots
from fixpoint.data import load_dataset
from fixpoint.models import ERNN
from fixpoint.training import record_training


class Classifier(nn.Module):
    """A classifier of the last state of a layer called like torch.nn.RNN."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _ = self.layer(x)
        return self.head(output[:, -1])


EPOCHS = 15
EVERY = 4  # one of 4 walks is used

data = load_dataset("toy-walks")
x, y, x_test, y_test = (
    part[::EVERY] for part in (data.x_train, data.y_train, data.x_test, data.y_test)
)
histories = {}
solver = InexactNewton(1, timesteps=100)  # one learned step at each t
for layer in (
    nn.RNN(2, 10, batch_first=True),
    ERNN(2, 10, map="identity-feedback", solver=solver, batch_first=True),
):
    torch.manual_seed(0)
    model = Classifier(layer)
    history = record_training(model, x, y, test=(x_test, y_test), epochs=EPOCHS, clip=1.0)
    assert history.accuracy is not None
    name, accuracy = type(layer).__name__, history.accuracy[-1]
    print(f"{name}: test accuracy {accuracy:.1f} %, training loss {history.loss[-1]:.3f}")
    histories[name] = history
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
plots.plot_loss(histories, axes)
plt.show()
