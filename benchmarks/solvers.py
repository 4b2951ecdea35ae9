"""Solvers against bare loops and torchdeq, as ratios of times within one process.

    python benchmarks/solvers.py [--quick] [--device cuda] [--compile]

phi(z) = tanh(z U^T + x) with ||U||_2 = 0.9, solved to a relative residual of 1e-6 in float32.
Each time is the least of several runs, the contestants taken by turns.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torchdeq
from figures import Figures, add_options, device_name, synchronize
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fixpoint
from fixpoint import Anderson, Broyden, FixedPoint, Implicit, IterativeSolver, Picard, Unrolled

RTOL, MAX_ITER = 1e-6, 60
OURS: dict[str, Callable[..., IterativeSolver]] = {
    "fixed_point_iter": Picard,
    "anderson": Anderson,
    "broyden": Broyden,
}
COMPILED: dict[str, IterativeSolver] = {  # eager ones measure each update
    "Picard": Picard(rtol=RTOL, atol=0.0, max_iter=MAX_ITER),
    "Picard, 5 a pass": Picard(rtol=RTOL, atol=0.0, max_iter=MAX_ITER, check_every=5),
    "Anderson": Anderson(rtol=RTOL, atol=0.0, max_iter=MAX_ITER),
    "Anderson, 5 a pass": Anderson(rtol=RTOL, atol=0.0, max_iter=MAX_ITER, check_every=5),
    "Broyden(memory=16)": Broyden(memory=16, rtol=RTOL, atol=0.0, max_iter=MAX_ITER),
}
SIZES_COMPILED = ((128, 128), (1, 100), (1024, 128))
console = Console(width=126)


class Problem(NamedTuple):
    """phi and its parameters; z0 = 0, (B, D)."""

    name: str
    U: Tensor
    x: Tensor

    def phi(self, z: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(self.x, z, self.U.t()))


def make_problem(B: int, D: int, *, symmetric: bool, device: str) -> Problem:
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(D, D, generator=generator)
    U = U + U.t() if symmetric else U
    norm = torch.linalg.matrix_norm(U, 2) if D < 1000 else _norm_by_power(U)
    U = (0.9 / norm * U).to(device).requires_grad_()
    x = torch.randn(B, D, generator=generator).to(device).requires_grad_()
    return Problem(f"B={B} D={D} {'symmetric' if symmetric else 'not symmetric'}", U, x)


def _norm_by_power(U: Tensor) -> Tensor:
    v = torch.ones(U.shape[1])
    for _ in range(100):
        v = U.t() @ (U @ v)
        v = v / v.norm()
    return (U @ v).norm()


def bare_loop(problem: Problem) -> tuple[Tensor, int]:
    """Plain iteration with the test that stops it, and nothing else."""
    z = torch.zeros_like(problem.x)
    with torch.no_grad():
        for k in range(MAX_ITER):
            fz = problem.phi(z)
            if ((fz - z).norm(dim=1) / fz.norm(dim=1)).max() <= RTOL:
                return z, k + 1
            z = fz
    return z, MAX_ITER


def best(contestants: dict[str, Callable[[], object]], runs: int, device: str) -> dict[str, float]:
    """Least time of each in ms, the contestants taken by turns."""
    least = dict.fromkeys(contestants, float("inf"))
    for _ in range(runs):
        for name, work in contestants.items():
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            least[name] = min(least[name], 1e3 * (time.perf_counter() - start))
    return least


def theirs(name: str) -> torchdeq.core.DEQBase:
    return torchdeq.get_deq(
        f_solver=name,
        b_solver="broyden" if name == "broyden" else "anderson",
        f_max_iter=MAX_ITER,
        b_max_iter=MAX_ITER,
        f_tol=RTOL,
        b_tol=RTOL,
        f_stop_mode="rel",
        b_stop_mode="rel",
        ift=True,
    )


def compare_solvers(problem: Problem, runs: int, figures: Figures) -> None:
    z0 = torch.zeros_like(problem.x)
    table = Table(title=f"{problem.name}, forward; forward + backward", box=box.SIMPLE_HEAD)
    for head in (
        "solver",
        "evals",
        "theirs",
        "ms",
        "bare ms",
        "x bare",
        "torchdeq ms",
        "x torchdeq",
        "fw + bw ms",
        "torchdeq ms",
        "x torchdeq",
    ):
        table.add_column(head, justify="right" if head != "solver" else "left")
    for name, kind in OURS.items():
        solver = kind(rtol=RTOL, atol=0.0, max_iter=MAX_ITER)
        layer = FixedPoint(solver, Implicit(kind(rtol=RTOL, atol=0.0, max_iter=MAX_ITER)))
        deq = theirs(name).eval()
        deq_train = theirs(name).train()

        def ours_backward(layer: FixedPoint = layer) -> None:
            z = layer(problem.phi, z0).z
            torch.autograd.grad(z.sum(), [problem.U, problem.x])

        def their_forward(deq: torchdeq.core.DEQBase = deq) -> object:
            with torch.no_grad():
                return deq(problem.phi, z0)

        def their_backward(deq: torchdeq.core.DEQBase = deq_train) -> None:
            z = deq(problem.phi, z0)[0][-1]
            torch.autograd.grad(z.sum(), [problem.U, problem.x])

        t = best(
            {
                "bare": lambda: bare_loop(problem),
                "ours": lambda solver=solver: fixpoint.solve(problem.phi, z0, solver),
                "torchdeq": their_forward,
                "ours, backward": ours_backward,
                "torchdeq, backward": their_backward,
            },
            runs,
            problem.x.device.type,
        )
        ms = {key: round(value, 3) for key, value in t.items()}
        figures.add(
            problem=problem.name, solver=kind.__name__, threads=torch.get_num_threads(), ms=ms
        )
        solution = fixpoint.solve(problem.phi, z0, solver).check()
        table.add_row(
            f"{kind.__name__}",
            str(solution.evaluations),
            str(int(their_forward()[1]["nstep"].max())),
            f"{t['ours']:.2f}",
            f"{t['bare']:.2f}",
            f"{t['ours'] / t['bare']:.2f}",
            f"{t['torchdeq']:.2f}",
            f"{t['ours'] / t['torchdeq']:.2f}",
            f"{t['ours, backward']:.2f}",
            f"{t['torchdeq, backward']:.2f}",
            f"{t['ours, backward'] / t['torchdeq, backward']:.2f}",
        )
    console.print(table)


def compare_compiled(problem: Problem, runs: int, figures: Figures) -> None:
    """Solves compiled to one graph compared with eager ones, and how long compiling takes."""
    z0, device = torch.zeros_like(problem.x), problem.x.device.type

    def forward(solver: IterativeSolver) -> Tensor:
        return fixpoint.solve(problem.phi, z0, solver).z

    def state(layer: FixedPoint) -> Tensor:
        return layer(problem.phi, z0).z

    def gradient(state: Callable[[FixedPoint], Tensor], layer: FixedPoint) -> None:
        torch.autograd.grad(state(layer).sum(), [problem.U, problem.x])

    for name, solver in COMPILED.items():
        plain = solver.with_options(check_every=1)
        torch._dynamo.reset()
        fast_forward = partial(torch.compile(forward, fullgraph=True), solver)
        fast_state = torch.compile(state, fullgraph=True)
        fast_both = partial(gradient, fast_state, FixedPoint(solver, Implicit()))
        clock = [time.perf_counter()]
        for compiled in (fast_forward, fast_both):
            compiled()
            clock.append(time.perf_counter())
        seconds = [round(b - a, 1) for a, b in pairwise(clock)]
        t = best(
            {
                "forward": partial(forward, plain),
                "compiled forward": fast_forward,
                "both": partial(gradient, state, FixedPoint(plain, Implicit())),
                "compiled both": fast_both,
            },
            runs,
            device,
        )
        ms = {key: round(value, 3) for key, value in t.items()}
        figures.add(problem=problem.name, solver=name, compiling_s=seconds, ms=ms)
        console.print(
            f"  {problem.name}, {name}: compiled / eager {t['compiled forward']:.2f} / "
            f"{t['forward']:.2f} ms = {t['compiled forward'] / t['forward']:.2f}, with backward "
            f"{t['compiled both']:.2f} / {t['both']:.2f} ms = "
            f"{t['compiled both'] / t['both']:.2f}; compiling {seconds[0]} s, {seconds[1]} s"
        )


def compare_unrolled(problem: Problem, runs: int) -> None:
    """K tracked updates against the loop one would write by hand, forward + backward."""
    z0 = torch.zeros_like(problem.x)
    for K in (2, 10):
        layer = FixedPoint(Picard(max_iter=K, rtol=0.0, atol=0.0), Unrolled())

        def by_hand(K: int = K) -> None:
            z = z0
            for _ in range(K):
                z = problem.phi(z)
            torch.autograd.grad(z.sum(), [problem.U, problem.x])

        def ours(layer: FixedPoint = layer) -> None:
            torch.autograd.grad(layer(problem.phi, z0).z.sum(), [problem.U, problem.x])

        t = best({"hand": by_hand, "ours": ours}, 3 * runs, problem.x.device.type)
        console.print(
            f"  unrolled K={K}: {t['ours']:.2f} ms, by hand {t['hand']:.2f} ms, "
            f"ratio {t['ours'] / t['hand']:.2f}"
        )


def broyden_memory(problem: Problem) -> None:
    """Numbers that Broyden's state holds when its memory is full, over rank x B x D."""
    rank = 20
    solver = Broyden(memory=rank, rtol=0.0, atol=0.0, max_iter=rank + 1)
    with torch.no_grad():
        _, state = solver.run_with_state(problem.phi, torch.zeros_like(problem.x))
    numbers = sum(part.numel() for part in tree_leaves(state) if isinstance(part, torch.Tensor))
    fraction = numbers / (rank * problem.x.numel())
    console.print(
        f"  Broyden at rank {rank} holds {fraction:.2f} x rank x B x D numbers, "
        f"{4 * numbers / 2**20:.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs, small problems only")
    parser.add_argument("--compile", action="store_true", help="compiled and eager solves")
    add_options(parser)
    options = parser.parse_args()
    quick, device, figures = options.quick, options.device, Figures(options.json)
    runs = 3 if quick else 15
    console.print(
        f"fixpoint {fixpoint.__version__}, torchdeq 0.1.0, Python {platform.python_version()}, "
        f"{device_name(device)}"
    )
    if options.compile:
        torch.set_num_threads(1)
        for B, D in SIZES_COMPILED[:1] if quick else SIZES_COMPILED:
            problem = make_problem(B, D, symmetric=True, device=device)
            compare_compiled(problem, runs, figures)
        return
    for threads in (1,) if quick or device == "cuda" else (1, 2):
        torch.set_num_threads(threads)
        console.print(f"\n[bold]{threads} thread{'s' * (threads > 1)}[/bold]")
        for symmetric in (True, False):
            problem = make_problem(128, 128, symmetric=symmetric, device=device)
            compare_solvers(problem, runs, figures)
            compare_unrolled(problem, runs)
            broyden_memory(problem)
        if not quick:
            large = make_problem(16, 4096, symmetric=False, device=device)
            compare_solvers(large, 5, figures)


if __name__ == "__main__":
    main()
