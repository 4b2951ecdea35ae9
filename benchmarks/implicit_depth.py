"""Cost of the backward pass of `Implicit` by the length of the graph behind phi, as ratios.

    python benchmarks/implicit_depth.py [--quick]

Backward time a time step of h_t = tanh(0.5 U h_t + V h_{t-1} + x_t) by the number of time steps T,
relative to T = 32; and that of one solve behind N layers, without theirs, relative to no layers.
Both are 1 where an adjoint walks the operations of phi alone.
"""

from __future__ import annotations

import argparse
import time

import torch
from processor import processor
from torch import Tensor

from fixpoint import FixedPoint, Implicit, Picard

B, D = 32, 40


def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    U, V = torch.randn(2, D, D, generator=generator) / D**0.5 / 2
    return U.requires_grad_(), V.requires_grad_()


def backward_time(loss: Tensor) -> float:
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def through_time(T: int) -> float:
    """Milliseconds of the backward pass a time step."""
    (U, V), layer = weights(), FixedPoint(Picard(rtol=1e-5), Implicit())
    h = torch.zeros(B, D)
    for x in torch.randn(T, B, D, generator=torch.Generator().manual_seed(1)):
        past = h @ V.T + x
        h = layer(lambda z, past=past: torch.tanh(0.5 * z @ U.T + past), h).z
    return 1e3 * backward_time(h.sum()) / T


def behind_layers(N: int) -> float:
    """Milliseconds of the gradient of one solve with respect to the output of N layers."""
    (U, V), layer = weights(), FixedPoint(Picard(rtol=1e-5), Implicit())
    x = torch.ones(B, D)
    for _ in range(N):
        x = torch.tanh(x @ V.T)
    x = x + V.sum() / D
    found = []
    for _ in range(10):
        z = layer(lambda z: torch.tanh(0.5 * z @ U.T + x), torch.zeros(B, D)).z
        start = time.perf_counter()
        torch.autograd.grad(z.sum(), x, retain_graph=True)
        found.append(time.perf_counter() - start)
    return 1e3 * min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter sequences")
    quick = parser.parse_args().quick
    print(f"{processor()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    through_time(8)
    for name, measure, sizes in (
        ("time steps", through_time, (32, 128) if quick else (32, 64, 128, 256, 512, 1024)),
        ("layers", behind_layers, (0, 100) if quick else (0, 100, 1000)),
    ):
        found = {size: min(measure(size) for _ in range(3)) for size in sizes}
        first = found[sizes[0]]
        for size, ms in found.items():
            print(f"{size:5d} {name}: {ms:.2f} ms, ratio {ms / first:.2f}")


if __name__ == "__main__":
    main()
