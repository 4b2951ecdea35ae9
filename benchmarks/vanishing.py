"""Time backward passes whose gradient vanishes over time, as that of a loss at the last step does.

Numbers below the smallest normal one are slow on some processors; the compiled layers round them
to 0, torch does after `torch.set_flush_denormal(True)`. With a gradient at each time step, which
does not vanish, and without one at any but the last. Minima of interleaved runs, one thread.
Run: python benchmarks/vanishing.py [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import environment
import torch
from figures import Figures, add_options
from processor import processor
from recurrent import Run, as_ms, minima
from torch import Tensor, nn

from fixpoint import InexactNewton
from fixpoint.models import ERNN, GRU, LSTM, RNN

B, T, n = 128, 784, 100
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "RNN": lambda: RNN(1, n, implementation="fused"),
    "torch.nn.RNN": lambda: nn.RNN(1, n),
    "GRU": lambda: GRU(1, n, implementation="fused"),
    "torch.nn.GRU": lambda: nn.GRU(1, n),
    "LSTM": lambda: LSTM(1, n, implementation="fused"),
    "torch.nn.LSTM": lambda: nn.LSTM(1, n),
    "ERNN, eta = 0.5": lambda: ERNN(1, n, nonlinearity="tanh", solver=InexactNewton(1, eta=0.5)),
}


def backward(output: Tensor, weights: list[nn.Parameter], gradient: Tensor, *, flush: bool) -> Run:
    """One backward pass, again and again through the same graph."""

    def run() -> None:
        torch.set_flush_denormal(flush)
        torch.autograd.grad(output, weights, gradient, retain_graph=True)
        torch.set_flush_denormal(False)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = Figures(options.json)
    print(processor(), "torch", torch.__version__)
    print("OpenBLAS runs", environment.blas_kernel())
    print(f"(B, T, d, n) = ({B}, {T}, 1, {n}); backward pass, ms")
    print(f"  {'':16}{'each step':>12}{'last step':>12}{'and flushed':>12}")
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        layer = make()
        output, weights = layer(torch.randn(T, B, 1))[0], list(layer.parameters())
        each, last = torch.randn(T, B, n) / T, torch.zeros(T, B, n)
        last[-1] = each[-1]
        runs = {
            "each step": backward(output, weights, each, flush=False),
            "last step": backward(output, weights, last, flush=False),
            "and flushed": backward(output, weights, last, flush=True),
        }
        found = as_ms(minima(runs, 2.0 if options.quick else 10.0))
        figures.add(shape=f"{name}, {B} x {T} x {n}", threads=1, ms=found)
        print(f"  {name:16}" + "".join(f"{ms:12.1f}" for ms in found.values()))


if __name__ == "__main__":
    main()
