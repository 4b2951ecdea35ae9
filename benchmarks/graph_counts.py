"""Numbers of updates of solves in a graph and without a compiler, over random maps.

    python benchmarks/graph_counts.py [--samples 2000] [--backend inductor] [--solver Anderson]

Each sample has a map of its own, phi(z) = tanh(U z + x) of 16 numbers, ||U||_2 between 0.2 and 1.5.
Both solve the same problems; rounding alone differs. For each solver and dtype: the samples, in per
cent, with the same count, with a count that is at most one off, and with the same result code, and
the largest distance of both states where both converged, over the size of the state.
"""

from __future__ import annotations

import argparse
import platform

import torch
from processor import processor
from torch import Tensor

import fixpoint
from fixpoint import SQUAREM, Anderson, Broyden, DampedPicard, IterativeSolver, Picard, Solution

D = 16
SOLVERS: dict[str, IterativeSolver] = {
    "Picard": Picard(),
    "DampedPicard": DampedPicard(),
    "SQUAREM": SQUAREM(),
    "Anderson": Anderson(),
    "Broyden(memory=20)": Broyden(memory=20),
}


def maps(B: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """U, (B, D, D), and x, (B, D); every second U is symmetric."""
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(B, D, D, generator=generator, dtype=dtype)
    U[::2] = U[::2] + U[::2].mT
    norm = 0.2 + 1.3 * torch.rand(B, 1, 1, generator=generator, dtype=dtype)
    U = U * (norm / torch.linalg.matrix_norm(U, 2).view(-1, 1, 1))
    return U, torch.randn(B, D, generator=generator, dtype=dtype)


def compare(name: str, solver: IterativeSolver, B: int, dtype: torch.dtype, backend: str) -> None:
    def run(U: Tensor, x: Tensor) -> Solution:
        def phi(z: Tensor) -> Tensor:
            return torch.tanh((U * z.unsqueeze(1)).sum(2) + x)

        return fixpoint.solve(phi, torch.zeros_like(x), solver)

    given = maps(B, dtype)
    torch._dynamo.reset()
    plain, found = run(*given), torch.compile(run, fullgraph=True, backend=backend)(*given)
    off = (plain.iterations - found.iterations).abs()
    both = plain.converged & found.converged
    distance = (plain.z - found.z).norm(dim=1)[both] / plain.z.norm(dim=1)[both]
    same_code = plain.result == found.result
    percent = [100 * float(x.double().mean()) for x in (off == 0, off <= 1, same_code)]
    print(
        f"{name:20} {str(dtype)[6:]}: same count {percent[0]:5.1f} %, at most one off "
        f"{percent[1]:5.1f} %, same code {percent[2]:5.1f} %, states {distance.max():.0e} apart; "
        f"{100 * float(both.double().mean()):.0f} % converged in both",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--solver", choices=SOLVERS, help="this one alone")
    options = parser.parse_args()
    print(
        f"fixpoint {fixpoint.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {processor()}, backend {options.backend}"
    )
    for name in SOLVERS if options.solver is None else [options.solver]:
        for dtype in (torch.float32, torch.float64):
            compare(name, SOLVERS[name], options.samples, dtype, options.backend)


if __name__ == "__main__":
    main()
