"""Time equilibria through time against one fused K = 1 step, their bare products and the loop.

One shape, as of HAR-2, with the self-feedback map of bound 0.7 and rtol 1e-3. Minima of
interleaved runs in one process: ratios hold where times drift.
Run: python benchmarks/equilibrium.py [--quick] [--loop] [--device cuda]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import environment
import torch
from figures import Figures, add_options, device_name
from recurrent import LARGE, SHAPES, Run, as_ms, elapsed_on_gpu, minima, ours_layer, training
from torch import Tensor

from fixpoint import Anderson, Broyden, Implicit, Picard, Unrolled
from fixpoint.backward import Backward
from fixpoint.models import ERNN, SelfFeedbackMap
from fixpoint.solvers import Solver

SOLVERS: dict[str, Callable[[], Solver]] = {
    "Picard": lambda: Picard(rtol=1e-3, atol=0),
    "Anderson": lambda: Anderson(rtol=1e-3, atol=0),
    "Broyden": lambda: Broyden(rtol=1e-3, atol=0),
    "unrolled": lambda: Picard(rtol=1e-3, atol=0),
}
ROWS = 32  # of a block, which ends its updates together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--loop", action="store_true", help="the loop over solves too")
    add_options(parser)
    options = parser.parse_args()
    seconds, figures = 2.0 if options.quick else 20.0, Figures(options.json)
    print(device_name(options.device))
    print("OpenBLAS runs", environment.blas_kernel())
    if options.device == "cuda":
        gpu(seconds, figures)
    else:
        cpu(seconds, figures, loop=options.loop)


def gpu(seconds: float, figures: Figures) -> None:
    """The fused scans against the K = 1 step, and against the loop over solves on the GPU."""
    for shape in ("HAR-2", "wide batch"):
        B, T, d, n = (SHAPES | LARGE)[shape]
        with torch.device("cuda"):
            x = torch.randn(T, B, d)
            runs: dict[str, Run] = {"K = 1": training(*ours_layer(T, B, d, n), x, n)}
            for name in ("Picard", "Anderson"):  # which have kernels
                make = SOLVERS[name]
                layer = make_layer(make(), d, n)
                runs[name] = layer_training(layer, x)
                runs[f"{name} inference"] = torch.no_grad()(lambda layer=layer, x=x: layer(x))
                plain = make_layer(make(), d, n, implementation="reference")
                runs[f"{name} loop"] = layer_training(plain, x)
            best = minima(runs, seconds, lambda run: elapsed_on_gpu(run, 1))
        print(f"\n{shape} (B, T, d, n) = {(B, T, d, n)}; ms")
        for name, time in best.items():
            print(f"  {name:20}{time * 1e3:9.2f}{time / best['K = 1']:7.1f} x K = 1")
        figures.add(shape=shape, ms=as_ms(best))


def cpu(seconds: float, figures: Figures, *, loop: bool) -> None:
    times = {threads: compare(threads, seconds, loop=loop) for threads in (1, 2)}
    for threads, best in times.items():
        figures.add(shape="HAR-2", threads=threads, ms=as_ms(best))
    print("\n2 threads against 1:", end="")
    for name in SOLVERS:
        print(f"  {name} {times[1][name] / times[2][name]:.2f}x", end="")
    print("\n\nHAR-2, 1 thread, forward and backward: ms for T time steps, and us for each")
    B, _, d, n = SHAPES["HAR-2"]
    torch.set_num_threads(1)
    runs = {
        f"{name}, T = {T}": steps(name, T, B, d, n)
        for name in ("Picard", "Anderson", "Broyden")
        for T in (64, 128, 256)
    }
    for name, best in minima(runs, seconds).items():
        T = int(name.split()[-1])
        print(f"  {name:20}{best * 1e3:8.2f}{best / T * 1e6:8.1f}")


def compare(threads: int, seconds: float, *, loop: bool) -> dict[str, float]:
    """Print one table; the time of forward and backward of each solver."""
    torch.set_num_threads(threads)
    B, T, d, n = SHAPES["HAR-2"]
    x = torch.randn(T, B, d)
    runs: dict[str, Run] = {"K = 1": training(*ours_layer(T, B, d, n), x, n)}
    counts: dict[str, int] = {}
    for name, make in SOLVERS.items():
        layer = make_layer(make(), d, n, backward=backward_of(name))
        runs[name] = layer_training(layer, x)
        runs[f"{name} inference"] = torch.no_grad()(lambda layer=layer: layer(x))
        counts[name] = evaluations_of_blocks(layer.trajectory(x).iterations)
        runs[f"{name} products"] = products(counts[name], n)
        if loop:
            plain = make_layer(make(), d, n, "reference", backward_of(name))
            runs[f"{name} loop"] = layer_training(plain, x)
    best = minima(runs, seconds)
    print(f"\nHAR-2 (B, T, d, n) = {(B, T, d, n)}, {threads} threads; ms")
    print(f"  {'K = 1 step':20}{best['K = 1'] * 1e3:9.2f}")
    for name in SOLVERS:
        forward, bare = best[f"{name} inference"], best[f"{name} products"]
        print(
            f"  {name:20}{best[name] * 1e3:9.2f}{best[name] / best['K = 1']:7.1f} x K = 1,"
            f" forward {forward * 1e3:.2f}, {forward / bare * threads:.2f} x its products"
        )
        if loop:
            print(f"  {'  the loop':20}{best[f'{name} loop'] * 1e3:9.2f}")
    return best


def backward_of(name: str) -> Backward:
    return Unrolled() if name == "unrolled" else Implicit()


def make_layer(
    solver: Solver,
    d: int,
    n: int,
    implementation: str = "fused",
    backward: Backward | None = None,
) -> ERNN:
    torch.manual_seed(0)
    phi = SelfFeedbackMap(d, n, bound=0.7)
    options = {
        "solver": solver,
        "backward": backward or Implicit(),
        "implementation": implementation,
    }
    return ERNN(d, n, map=phi, **options)


def layer_training(layer: ERNN, x: Tensor) -> Run:
    return training(lambda x: layer(x)[0], list(layer.parameters()), x, layer.hidden_size)


def steps(name: str, T: int, B: int, d: int, n: int) -> Run:
    return layer_training(
        make_layer(SOLVERS[name](), d, n, backward=backward_of(name)), torch.randn(T, B, d)
    )


def evaluations_of_blocks(iterations: Tensor) -> int:
    """Evaluations of phi for a block of rows, which continues until all its rows are done."""
    return int(sum((part.amax(1) + 1).sum() for part in iterations.split(ROWS, 1)))


def products(count: int, n: int) -> Run:
    """Products of a block with U on one thread, and nothing else."""
    h, A, out = torch.randn(ROWS, n), torch.randn(n, n), torch.empty(ROWS, n)

    def run() -> None:
        for _ in range(count):
            torch.mm(h, A, out=out)

    return run


if __name__ == "__main__":
    main()
