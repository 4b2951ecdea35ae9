"""
ERNN in the place of torch.nn.RNN
=================================

The paper's toy task, ``python examples/07_drop_in_for_rnn.py --epochs 15``: which of two step sizes
made a random walk of 100 steps.
"""

import argparse

import torch
from torch import nn

from fixpoint import InexactNewton
from fixpoint.data.sources.toy_walks import toy_walks
from fixpoint.models import ERNN
from fixpoint.training import record_training


class Classifier(nn.Module):
    """Written for torch.nn.RNN; any layer with its call will do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _ = self.layer(x)
        return self.head(output[:, -1])


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--walks", type=int, default=2000, help="of each class to train on")
options = parser.parse_args()
data = toy_walks(walks=2 * options.walks)  # one half is for testing
solver = InexactNewton(1, timesteps=100)  # one learned step at each t
for layer in (
    nn.RNN(2, 10, batch_first=True),
    ERNN(2, 10, cell="identity-feedback", solver=solver, batch_first=True),
):
    torch.manual_seed(0)
    model = Classifier(layer)
    history = record_training(
        model,
        data.x_train,
        data.y_train,
        test=(data.x_test, data.y_test),
        epochs=options.epochs,
        clip=1.0,
    )
    assert history.accuracy is not None
    name, accuracy = type(layer).__name__, history.accuracy[-1]
    print(f"{name}: test accuracy {accuracy:.1f} %, training loss {history.loss[-1]:.3f}")
