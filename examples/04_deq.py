"""
A deep equilibrium model
========================

Train a small deep equilibrium model on real windows.

Each window (128 steps of 9 channels) becomes the mean, the s.d. and the mean step of each channel.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from fixpoint import Anderson
from fixpoint.analysis import spectral_radius
from fixpoint.data import load_dataset
from fixpoint.models import DEQ, VariationalDropout, bound_spectral_norm


class Layer(nn.Module):
    """f(z, x) = tanh(W z + U x + b) with ||W||_2 = 0.95: exactly one equilibrium."""

    def __init__(self, d: int, H: int) -> None:
        super().__init__()
        self.W = bound_spectral_norm(nn.Linear(H, H, bias=False), bound=0.95)
        self.U = nn.Linear(d, H)
        self.dropout = VariationalDropout(0.05)

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dropout(self.W(z)) + self.U(x))


def features(x: torch.Tensor) -> torch.Tensor:
    """Compute mean, s.d. and mean absolute step over time, (N, T, d) -> (N, 3 d)."""
    return torch.cat([x.mean(1), x.std(1), x.diff(dim=1).abs().mean(1)], 1)


EPOCHS = 30

torch.manual_seed(0)
data = load_dataset("har2-sample")
x_train, x_test = features(data.x_train), features(data.x_test)
mean, std = x_train.mean(0), x_train.std(0)
x_train, x_test = (x_train - mean) / std, (x_test - mean) / std
deq = DEQ(Layer(x_train.shape[1], 64), Anderson(rtol=1e-4), hidden_size=64)
model = nn.Sequential(deq, nn.Linear(64, len(data.classes)))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
accuracies, iterations = [], []
for _ in range(EPOCHS):
    model.train()
    for rows in torch.randperm(len(x_train)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_train[rows]), data.y_train[rows]).backward()
        optimizer.step()
    accuracies.append((model.eval()(x_test).argmax(1) == data.y_test).float().mean().item())
    iterations.append(int(deq.solution.check().iterations.max()))
print(f"accuracy {accuracies[-1]:.3f}, at most {iterations[-1]} iterations")
rho = spectral_radius(lambda z: deq.f(z, x_test), deq.solution.z)
print(f"spectral radius: {rho.mean():.3f} on average, {rho.max():.3f} at most")
_, (left, right) = plt.subplots(1, 2, figsize=(6, 2.8), layout="constrained")
left.plot(range(1, EPOCHS + 1), accuracies)
left.set(xlabel="epoch", ylabel="test accuracy")
right.plot(range(1, EPOCHS + 1), iterations)
right.set(xlabel="epoch", ylabel="most iterations of a sample")
plt.show()
