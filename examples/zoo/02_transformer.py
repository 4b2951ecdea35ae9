"""
One transformer block, to its equilibrium
=========================================

Windows of 128 samples of a phone's nine motion sensors, cut into 16 tokens of 8 samples. A single
transformer block with one set of weights is applied until its output no longer changes::

    z = phi(z) = x + attention(norm(z)) + mlp(norm(z)),

a network of any depth with the parameters, and the training memory, of one block. The task is to
tell walking, going downstairs and standing from going upstairs, sitting and lying: 756 windows of
some people train it, 324 of others test it. Bounds on the weights let every window come to rest.
The same block applied once is trained for comparison: this task does not need the depth.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from fixpoint import Anderson, solve
from fixpoint.data import load_dataset, normalize
from fixpoint.models import DEQ, bound_spectral_norm, frozen

WIDTH, HEADS, EPOCHS = 32, 4, 8


class Block(nn.Module):
    """phi(z, x) of tokens, (B, 16, WIDTH); of x alone it is the block applied once."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        for part in (self.attention.out_proj, self.mlp[2]):
            bound_spectral_norm(part, bound=0.4, only_above=True)
        bound_spectral_norm(self.attention, "in_proj_weight", bound=1.0, only_above=True)
        bound_spectral_norm(self.mlp[0], bound=1.0, only_above=True)

    def forward(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        seen = self.norm(z)
        heard, _ = self.attention(seen, seen, seen, need_weights=False)
        return (z if x is None else x) + heard + self.mlp(seen)


class Classifier(nn.Module):
    """Scores of two classes, (B, 2), of windows, (B, 128, 9)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(72, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.place = nn.Parameter(0.1 * torch.randn(16, WIDTH))
        self.layer, self.head = layer, nn.Linear(WIDTH, 2)

    def embedded(self, windows: Tensor) -> Tensor:
        """Make tokens, (B, 16, WIDTH), of mean 0 and variance 1."""
        tokens = self.embed(windows.reshape(-1, 16, 72)) + self.place
        return nn.functional.layer_norm(tokens, [WIDTH])

    def forward(self, windows: Tensor) -> Tensor:
        return self.head(self.layer(self.embedded(windows)).mean(1))


data = normalize(load_dataset("har2-sample"))
curves = {}
for name in ("once", "equilibrium"):
    torch.manual_seed(0)
    model = Classifier(Block() if name == "once" else DEQ(Block(), Anderson(rtol=1e-3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    curves[name] = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data.x_train)).split(42):
            optimizer.zero_grad()
            scores = model(data.x_train[rows])
            nn.functional.cross_entropy(scores, data.y_train[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            right = model(data.x_test).argmax(1) == data.y_test
        curves[name].append(right.float().mean().item())
    print(f"{name}: accuracy {curves[name][-1]:.3f}")
print(model.layer.solution)

# %%
# Left: accuracy. Right: how each of the first 60 test windows comes to rest.
_, (left, axes) = plt.subplots(1, 2, figsize=(6.4, 3), layout="constrained")
for name, curve in curves.items():
    left.plot(range(1, EPOCHS + 1), curve, "o-", label=name)
left.set(xlabel="epoch", ylabel="test accuracy")
left.legend()
tokens = model.embedded(data.x_test[:60]).detach()
with frozen(model.layer.f) as phi:
    recorded = model.layer.fixed_point.solver.with_options(record="residual", rtol=1e-6)
    trace = solve(lambda z: phi(z, tokens), torch.zeros_like(tokens), recorded).trace
axes.semilogy(1e-6 * trace.residual, color="C1", alpha=0.3)
axes.set(xlabel="update", ylabel="residual, relative to z")
plt.show()
