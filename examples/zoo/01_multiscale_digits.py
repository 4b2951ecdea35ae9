"""
A multi-scale equilibrium reads digits
======================================

A state that is a tree: features of an image at 16 x 16, 8 x 8 and 4 x 4 points, settled together ::

    z_i = phi_i(z) = tanh(conv_i(z_i) + sum_j resampled(z_j) + x_i),   i = 1, 2, 3,

each tensor to the tolerance by itself. The digits are those of matplotlib's typefaces, distorted:
the model learns from DejaVu and Computer Modern; it reads STIX too, which it has not seen.
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d as pool

from fixpoint import Anderson
from fixpoint.models import DEQ, bound_spectral_norm

C, STEPS = 8, 90


def glyphs(family: str) -> Tensor:
    """Draw the digits of a family of typefaces, (typefaces, 10, 32, 32) in 0 .. 1."""
    found = []
    for path in sorted(Path(matplotlib.get_data_path(), "fonts/ttf").glob(family)):
        font = ImageFont.truetype(str(path), 26)
        for digit in "0123456789":
            image = Image.new("L", (32, 32))
            ImageDraw.Draw(image).text((16, 16), digit, 255, font, anchor="mm")
            found.append(torch.tensor(list(image.tobytes())).view(32, 32) / 255)
    return torch.stack(found).unflatten(0, (-1, 10))


def samples(images: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw and distort digits, (count, 1, 16, 16), and their labels."""
    faces, labels = torch.randint(len(images), (count,)), torch.randint(10, (count,))
    turns = torch.eye(2, 3) + 0.05 * torch.randn(count, 2, 3)
    grid = nn.functional.affine_grid(turns, [count, 1, 16, 16], align_corners=False)
    x = nn.functional.grid_sample(images[faces, labels, None], grid, align_corners=False)
    return x + 0.1 * torch.randn_like(x), labels


class Scales(nn.Module):
    """phi of a state of three resolutions, (B, C, 16, 16), (B, C, 8, 8), (B, C, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Conv2d(C, C, 3, padding=1, bias=False) for _ in range(3))
        self.other = nn.ModuleList(nn.Conv2d(C, C, 1, bias=False) for _ in range(3))
        for conv in [*self.own, *self.other]:
            bound_spectral_norm(conv, bound=0.25)

    def forward(self, z: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        fine, middle, coarse = (self.other[i](z[i]) for i in range(3))
        up = nn.Upsample(scale_factor=2)
        heard = (up(middle), pool(fine, 2) + up(coarse), pool(middle, 2))
        return tuple(torch.tanh(self.own[i](z[i]) + heard[i] + x[i]) for i in range(3))


def scores(images: Tensor) -> Tensor:
    """Rate the ten digits, (B, 10), for images (B, 1, 16, 16)."""
    z = deq(tuple(inject[i](pool(images, 2**i)) for i in range(3)))
    return head(torch.cat([nn.functional.adaptive_avg_pool2d(part, 8).flatten(1) for part in z], 1))


torch.manual_seed(0)
known = torch.cat([glyphs(name) for name in ("DejaVuS*[!y].ttf", "cm[brt]*.ttf")])
tests = {"known": samples(known, 200), "STIX": samples(glyphs("STIXGeneral*.ttf"), 200)}
inject = nn.ModuleList(nn.Conv2d(1, C, 5, padding=2) for _ in range(3))
deq, head = DEQ(Scales(), Anderson(rtol=1e-3)), nn.Linear(3 * 64 * C, 10)
optimizer = torch.optim.Adam(nn.ModuleList([inject, deq, head]).parameters(), lr=1e-2)
curves: dict[str, list[float]] = {name: [] for name in tests}
for step in range(1, STEPS + 1):
    images, labels = samples(known, 50)
    optimizer.zero_grad()
    nn.functional.cross_entropy(scores(images), labels).backward()
    optimizer.step()
    for name, (images, labels) in tests.items() if step % 15 == 0 else ():
        with torch.no_grad():
            curves[name].append((scores(images).argmax(1) == labels).float().mean().item())
print({name: f"accuracy {curve[-1]:.3f}" for name, curve in curves.items()}, deq.solution)

# Eight test images, and one feature of each at the equilibrium, at the three resolutions.
panels = plt.figure(figsize=(9, 3.6), layout="constrained").subfigures(1, 2, width_ratios=(2, 1))
shown, bare = [images, *deq.solution.z], {"xticks": [], "yticks": []}
for i, ax in enumerate(panels[0].subplots(4, 8, subplot_kw=bare).flat):
    ax.imshow(shown[i // 8][i % 8, 0].numpy(), cmap="gray_r" if i < 8 else "coolwarm")
ax = panels[1].subplots()
for name, curve in curves.items():
    ax.plot(range(15, STEPS + 1, 15), curve, "o-", label=f"{name} typefaces")
ax.set(xlabel="step", ylabel="accuracy", ylim=(None, 1))
ax.legend()
plt.show()
