"""
An implicit neural image
========================

Terrain as a function: a network takes two coordinates and returns the height there. Its hidden
layer is an equilibrium::

    z = phi(z) = sin(W z + U x + b),   ||W|| <= 0.9,

so that 64 units serve as a network of any depth, with the memory of one layer. All 1600 points of
a 40 x 40 elevation map of Jacksboro, Tennessee, which comes with matplotlib, are one batch at every
step. So the last equilibrium is near the next one: with it as a warm start a solve takes two or
three evaluations. For comparison a layer of the same size without W, trained in the same way.
"""

import matplotlib.cbook
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from fixpoint import Anderson
from fixpoint.models import DEQ, bound_spectral_norm

STEPS, SIDE, H = 120, 40, 64


class Layer(nn.Module):
    """phi(z, x) = sin(W z + U x + b), z (B, H) and points x (B, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.U = nn.Linear(2, H)
        nn.init.normal_(self.U.weight, std=8)  # waves of some two periods over the map
        self.W = bound_spectral_norm(nn.Linear(H, H, bias=False), bound=0.9, only_above=True)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.sin(self.W(z) + self.U(x))


def psnr(image: Tensor) -> float:
    """Compute the peak signal-to-noise ratio in dB."""
    return (10 * torch.log10(1 / (image - target).square().mean())).item()


torch.manual_seed(0)
with matplotlib.cbook.get_sample_data("jacksboro_fault_dem.npz") as file:
    heights = torch.tensor(file["elevation"][60 : 60 + 6 * SIDE, 60 : 60 + 6 * SIDE]).float()
heights = nn.functional.avg_pool2d(heights[None], 6)[0]
low, high = heights.min(), heights.max()
target = ((heights - low) / (high - low)).flatten()
line = torch.linspace(-1, 1, SIDE)
points = torch.cartesian_prod(line, line)

images, curves = {}, {}
for name in ("explicit", "implicit"):
    torch.manual_seed(1)
    deq, head = DEQ(Layer(), Anderson(rtol=1e-3), hidden_size=H), nn.Linear(H, 1)
    optimizer = torch.optim.Adam([*deq.parameters(), *head.parameters()], lr=5e-3)
    z0, curve, evaluations = torch.zeros(SIDE**2, H), [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if name == "explicit":
            z = torch.sin(deq.f.U(points))
        else:
            z = deq(points, z0)
            z0 = deq.solution.z
            evaluations.append(deq.solution.evaluations)
        image = head(z)[:, 0]
        (image - target).square().mean().backward()
        optimizer.step()
        curve.append(psnr(image.detach()))
    images[name], curves[name] = image.detach(), curve
    print(f"{name}: {curve[-1]:.1f} dB")
print(f"evaluations of a solve: {evaluations[0]} cold, {evaluations[-1]} warm, at the end")

_, grid = plt.subplots(2, 2, figsize=(6.4, 5), layout="constrained")
axes = grid.flat
pictures = {"terrain": target} | images
for ax, (name, image) in zip(axes, pictures.items(), strict=False):
    meters = (low + (high - low) * image).view(SIDE, SIDE).numpy()
    drawn = ax.imshow(meters, cmap="terrain", vmin=low.item(), vmax=high.item())
    ax.set(title=name, xticks=[], yticks=[])
plt.colorbar(drawn, ax=axes[2], label="height (m)")
for name, curve in curves.items():
    axes[3].plot(curve, label=name)
axes[3].set(xlabel="step", ylabel="PSNR (dB)")
axes[3].legend()
plt.show()
