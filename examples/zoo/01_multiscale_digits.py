"""
A multi-scale equilibrium reads digits
======================================

The state of this deep equilibrium model is a tree: features of an image at 16 x 16, 8 x 8 and
4 x 4 points, which settle together,

    z_i = phi_i(z) = tanh(conv_i(z_i) + sum_j resampled(z_j) + x_i),   i = 1, 2, 3,

each tensor to the tolerance by itself, with a bound on the norm of each kernel that keeps phi
contracting. The digits are those of matplotlib's typefaces: turned, sheared, shifted, and with
noise. It learns from DejaVu and Computer Modern, and reads STIX, which it has never seen. The
pixels x_i are injected at each resolution, and z has their shape.
"""

from functools import partial
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from fixpoint import Anderson
from fixpoint.models import DEQ, bound_spectral_norm

C, EPOCHS = 8, 7
FONTS = Path(matplotlib.get_data_path()) / "fonts/ttf"


def glyphs(family: str) -> Tensor:
    """Digits of all typefaces of a family, (typefaces, 10, 32, 32) in 0 .. 1."""
    found = []
    for path in sorted(FONTS.glob(family)):
        font = ImageFont.truetype(str(path), 26)
        for digit in "0123456789":
            image = Image.new("L", (32, 32))
            ImageDraw.Draw(image).text((16, 16), digit, 255, font, anchor="mm")
            found.append(torch.from_numpy(numpy.asarray(image) / 255).float())
    return torch.stack(found).unflatten(0, (-1, 10))


def samples(images: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Distorted digits of typefaces, (count, 1, 16, 16), and their labels."""
    faces, labels = torch.randint(len(images), (count,)), torch.randint(10, (count,))
    turns = torch.eye(2, 3) + 0.1 * torch.randn(count, 2, 3)
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
            bound_spectral_norm(conv, bound=0.4)

    def forward(self, z: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        fine, middle, coarse = (other(part) for other, part in zip(self.other, z, strict=True))
        pool, up = nn.functional.avg_pool2d, partial(nn.functional.interpolate, scale_factor=2)
        heard = (up(middle), pool(fine, 2) + up(coarse), pool(middle, 2))
        parts = zip(self.own, z, heard, x, strict=True)
        return tuple(
            torch.tanh(conv(part) + message + given) for conv, part, message, given in parts
        )


class Reader(nn.Module):
    """Scores of the ten digits, (B, 10), of images, (B, 1, 16, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.inject = nn.ModuleList(nn.Conv2d(1, C, 5, padding=2) for _ in range(3))
        self.deq = DEQ(Scales(), Anderson(rtol=1e-3))
        self.head = nn.Linear(3 * 16 * C, 10)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (x, nn.functional.avg_pool2d(x, 2), nn.functional.avg_pool2d(x, 4))
        z = self.deq(tuple(conv(part) for conv, part in zip(self.inject, sizes, strict=True)))
        seen = [nn.functional.adaptive_avg_pool2d(part, 4).flatten(1) for part in z]
        return self.head(torch.cat(seen, 1))


torch.manual_seed(0)
known = torch.cat([glyphs(name) for name in ("DejaVuS*[!y].ttf", "cm[brt]*.ttf")])
train, test = samples(known, 750), samples(glyphs("STIXGeneral*.ttf"), 300)
reader = Reader()
optimizer = torch.optim.Adam(reader.parameters(), lr=1e-2)
curve = []
for _ in range(EPOCHS):
    for rows in torch.randperm(750).split(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reader(train[0][rows]), train[1][rows]).backward()
        optimizer.step()
    with torch.no_grad():
        found = reader(test[0]).argmax(1)
    curve.append((found == test[1]).float().mean().item())
print(f"accuracy on the typeface not seen: {curve[-1]:.3f}; {reader.deq.solution}")

picture = plt.figure(figsize=(9, 3.6), layout="constrained")
left, right = picture.subfigures(1, 2, width_ratios=(2, 1))
for i, axes in enumerate(left.subplots(4, 8).T.flat):
    row, scale = divmod(i, 4)
    image = test[0][row, 0] if scale == 0 else reader.deq.solution.z[scale - 1][row, 0]
    axes.imshow(image.numpy(), cmap="gray_r" if scale == 0 else "coolwarm")
    axes.set(xticks=[], yticks=[])
axes = right.subplots()
axes.plot(range(1, EPOCHS + 1), curve, "o-")
axes.set(xlabel="epoch", ylabel="accuracy on STIX", ylim=(None, 1))
plt.show()
