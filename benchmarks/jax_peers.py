"""Solves and those of jaxopt and optimistix, compiled by XLA, as ratios within one process.

    python benchmarks/jax_peers.py [--quick] [--json FILE]

It runs in an environment of its own, since fixpoint does not depend on jax:

    python -m venv jax && jax/bin/pip install jax jaxopt optimistix torch numpy rich torchdeq
    jax/bin/python benchmarks/jax_peers.py

phi(z) = tanh(z U^T + x) with ||U||_2 = 0.9 in float32, one thread; z to a relative residual of
1e-6, and the gradient of its sum. Theirs are `jit` of `vmap` over the samples, so that each stops
by itself, as ours do; jaxopt, whose tolerance is absolute, has the length of the largest solution
in it. `residual` is the largest relative one of a sample, in float64. Each time is the least of
several runs, the contestants taken by turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import jaxopt
import numpy as np
import optimistix
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from figures import Figures
from processor import processor
from rich import box
from rich.console import Console
from rich.table import Table
from solvers import MAX_ITER, RTOL, Problem, best, make_problem

import fixpoint
from fixpoint import Anderson, FixedPoint, Implicit, IterativeSolver, Picard

OURS: dict[str, IterativeSolver] = {
    "Picard": Picard(rtol=RTOL, atol=0.0, max_iter=4 * MAX_ITER),
    "Anderson": Anderson(rtol=RTOL, atol=0.0, max_iter=MAX_ITER),
}
Solve = Callable[[Any, Any], Any]
"""z* of all samples, of U and x."""


def jax_solves(tolerance: float) -> dict[str, Solve]:
    """The peers, by name.

    Args:
        tolerance: |phi(z) - z| for jaxopt.
    """

    def phi(z: Any, U: Any, x: Any) -> Any:
        return jnp.tanh(U @ z + x)

    own = {"maxiter": 4 * MAX_ITER, "tol": tolerance}
    solvers = {
        "jaxopt fixed point": jaxopt.FixedPointIteration(phi, **own),
        "jaxopt Anderson": jaxopt.AndersonAcceleration(phi, history_size=5, ridge=1e-7, **own),
    }
    plain = optimistix.FixedPointIteration(rtol=RTOL, atol=1e-8)

    def by_optimistix(x: Any, U: Any) -> Any:
        def step(z: Any, args: Any) -> Any:
            return phi(z, *args)

        options = {"max_steps": 4 * MAX_ITER, "throw": False}
        return optimistix.fixed_point(step, plain, jnp.zeros_like(x), (U, x), **options).value

    def of(solver: Any) -> Solve:
        return lambda x, U: solver.run(jnp.zeros_like(x), U, x).params

    each = {name: of(solver) for name, solver in solvers.items()}
    each["optimistix fixed point"] = by_optimistix
    return {name: _of_batch(solve) for name, solve in each.items()}


def _of_batch(solve: Solve) -> Solve:
    rows = jax.vmap(solve, in_axes=(0, None))
    return lambda U, x: rows(x, U)


def residual(problem: Problem, z: Any) -> float:
    """The largest |phi(z) - z| / |phi(z)| of a sample."""
    U, x = problem.U.detach().double(), problem.x.detach().double()
    state = torch.from_numpy(np.array(z)).double()
    fz = torch.tanh(state @ U.t() + x)
    return float(((fz - state).norm(dim=1) / fz.norm(dim=1)).max())


def contestants(problem: Problem) -> dict[str, tuple[Callable[[], Any], Callable[[], Any], float]]:
    """Forward, forward + backward, and seconds of compiling, by name."""
    found: dict[str, tuple[Callable[[], Any], Callable[[], Any], float]] = {}
    z0 = torch.zeros_like(problem.x)

    def gradients(z: torch.Tensor) -> Any:
        return torch.autograd.grad(z.sum(), [problem.U, problem.x])

    for name, solver in OURS.items():
        layer = FixedPoint(solver, Implicit())

        def forward(solver: IterativeSolver = solver) -> torch.Tensor:
            return fixpoint.solve(problem.phi, z0, solver).z

        def state(layer: FixedPoint = layer) -> torch.Tensor:
            return layer(problem.phi, z0).z

        found[name] = forward, lambda state=state: gradients(state()), 0.0
        fast, fast_state = (torch.compile(f, fullgraph=True) for f in (forward, state))
        begin = time.perf_counter()
        fast()
        gradients(fast_state())
        seconds = time.perf_counter() - begin
        found[f"{name}, compiled"] = fast, lambda state=fast_state: gradients(state()), seconds
    U, x = (jnp.asarray(v.detach().numpy()) for v in (problem.U, problem.x))
    tolerance = RTOL * float(found["Picard"][0]().norm(dim=1).max())
    for name, solve in jax_solves(tolerance).items():
        fast = jax.jit(solve)
        both = jax.jit(jax.grad(lambda U, x, solve=solve: solve(U, x).sum(), argnums=(0, 1)))
        begin = time.perf_counter()
        jax.block_until_ready((fast(U, x), both(U, x)))
        seconds = time.perf_counter() - begin
        found[name] = (
            lambda fast=fast: jax.block_until_ready(fast(U, x)),
            lambda both=both: jax.block_until_ready(both(U, x)),
            seconds,
        )
    return found


def compare(problem: Problem, runs: int, figures: Figures, console: Console) -> None:
    entrants = contestants(problem)
    forward = best({name: entrant[0] for name, entrant in entrants.items()}, runs, "cpu")
    both = best({name: entrant[1] for name, entrant in entrants.items()}, runs, "cpu")
    table = Table(title=problem.name, box=box.SIMPLE_HEAD)
    for head in ("solver", "residual", "forward ms", "x jaxopt Anderson"):
        table.add_column(head, justify="left" if head == "solver" else "right")
    for head in ("with backward ms", "x jaxopt Anderson", "compiling s"):
        table.add_column(head, justify="right")
    for name, (run, _, seconds) in entrants.items():
        reached = residual(problem, run())
        table.add_row(
            name,
            f"{reached:.1e}",
            f"{forward[name]:.2f}",
            f"{forward[name] / forward['jaxopt Anderson']:.2f}",
            f"{both[name]:.2f}",
            f"{both[name] / both['jaxopt Anderson']:.2f}",
            f"{seconds:.0f}" if seconds else "",
        )
        figures.add(
            problem=problem.name,
            solver=name,
            residual=reached,
            forward_ms=round(forward[name], 3),
            both_ms=round(both[name], 3),
            compiling_s=round(seconds, 1),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs, one problem")
    parser.add_argument("--json", type=Path, help="append the figures to this file, one a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="jaxopt")  # it is no longer developed
    torch.set_num_threads(1)
    console, figures = Console(width=126), Figures(options.json)
    names = ("jax", "jaxopt", "optimistix")
    peers = ", ".join(f"{name} {version(name)}" for name in names)
    console.print(
        f"fixpoint {fixpoint.__version__}, torch {torch.__version__}, {peers}, Python "
        f"{platform.python_version()}, {processor()}, one thread"
    )
    for symmetric in (True,) if options.quick else (True, False):
        problem = make_problem(128, 128, symmetric=symmetric, device="cpu")
        compare(problem, 3 if options.quick else 15, figures, console)


if __name__ == "__main__":
    main()
