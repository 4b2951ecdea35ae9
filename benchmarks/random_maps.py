"""Unsolved and falsely solved samples of random maps, a table in Markdown.

phi(z) = tanh(gain W z + b), W and b of each sample normal, with variances 1 / D and 1, in
float64. Beyond a gain of 1 phi is not a contraction; a solution exists, as phi maps a cube
into itself. A residual of a solution is measured again: "false" counts samples said to have
converged where it is above the tolerance.

    python benchmarks/random_maps.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint import make_solver, solve

SAMPLES, RTOL, MAX_ITER = 480, 1e-8, 300
GAINS, SIZES = (0.9, 3.0, 6.0), (2, 5, 10)
SOLVERS = ("picard", "anderson", "broyden", "newton", "levenberg-marquardt", "auto")


def count(name: str, gain: float, D: int) -> tuple[int, int]:
    """Return how many samples have not converged, and how many have falsely."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(SAMPLES, D, D, dtype=torch.float64, generator=generator) * gain / D**0.5
    b = torch.randn(SAMPLES, D, dtype=torch.float64, generator=generator)

    def phi(z: Tensor) -> Tensor:
        return torch.tanh((W * z.unsqueeze(1)).sum(2) + b)

    solver = make_solver(name, rtol=RTOL, atol=0.0, max_iter=MAX_ITER)
    solution = solve(phi, torch.zeros_like(b), solver)
    fz = phi(solution.z)
    residual = (fz - solution.z).norm(dim=1) / fz.norm(dim=1)
    false = solution.converged & ~(residual <= 1.001 * RTOL)
    return int((~solution.converged).sum()), int(false.sum())


def main() -> None:
    torch.set_num_threads(1)
    print(f"| gain, D | {' | '.join(SOLVERS)} |\n|---|{'---|' * len(SOLVERS)}")
    wrong = 0
    for gain in GAINS:
        for D in SIZES:
            found = [count(name, gain, D) for name in SOLVERS]
            wrong += sum(false for _, false in found)
            print(f"| {gain:g}, {D} | {' | '.join(str(left) for left, _ in found)} |", flush=True)
    print(f"false: {wrong}")


if __name__ == "__main__":
    main()
