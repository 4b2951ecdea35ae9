"""Draw the figures of docs/parallel_in_time.md from trained ERNNs, and check the bound on them.

Run: python scripts/parallel_in_time.py RUN [RUN ...] --out docs, each RUN a folder of
`fixpoint train`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fixpoint.analysis import lyapunov_exponent, parallel_iterations, plots
from fixpoint.analysis.hidden_states import recurrent_layer
from fixpoint.sequence import leaky_error_bound, solve_sequence
from fixpoint.training import load_trained
from fixpoint.training.evaluation_subset import subset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    for run in options.runs:
        trained = load_trained(run)
        name, layer = trained.data.name, recurrent_layer(trained.model)
        x = subset(trained, "test", 4).features
        T = x.shape[1]
        lengths = [*(t for t in (8, 16, 32, 64, 128, 256, 512) if t < T), T]
        found = parallel_iterations(layer, x, lengths)
        print(name, *found.lengths.tolist(), sep="\t")
        print("sum |eta|", *(f"{v:.2f}" for v in found.total.tolist()), sep="\t")
        for jacobian, iterations in found.iterations.items():
            print(jacobian, *iterations.tolist(), sep="\t")
        print("bound", *found.bound.tolist(), sep="\t")
        plots.save(
            plots.parallel_iterations_figure(found, title=name),
            options.out / f"parallel_iterations_{name}.png",
        )
        ratio = bound_ratio(layer.l0, x.transpose(0, 1))
        print(f"largest error / bound over 20 iterations: {ratio:.3g}")
        exponent = lyapunov_exponent(layer.double(), x.double())
        print(exponent.sentence)
        axes = plots.plot_growth(exponent)
        plots.save(plots.figure_of(axes), options.out / f"lyapunov_{name}.png")


@torch.no_grad()
def bound_ratio(cell: torch.nn.Module, x: torch.Tensor, iterations: int = 20) -> float:
    """Largest |e_t^(i)| / (bound * max_s |e_s^(0)|) of a leaky cell, in float64; at most 1."""
    cell, x = cell.double(), x.double()
    h0 = x.new_zeros(x.shape[1], cell.hidden_size)
    weights, form = cell.recurrence(len(x)), cell.parallel_form(x, h0)
    decay, b = (v.expand(len(x), 1).reshape(-1) for v in (weights.a, weights.b))
    gain = b.abs() * torch.linalg.matrix_norm(weights.A, 2)
    bound = leaky_error_bound(decay, gain, iterations)
    exact = cell.states(x, h0, last_only=False)
    start = exact.norm(dim=2).amax(0)  # the iteration starts at h_0 = 0
    worst = 0.0
    for i in range(1, iterations + 1):
        z = solve_sequence(form.step, form.x, h0, decay=decay, rtol=0.0, atol=0.0, max_iter=i).z
        error = (z - exact).norm(dim=2)
        allowed = bound[i, :, None] * start + 1e-12 * start
        worst = max(worst, (error / allowed).max().item())
    return worst


if __name__ == "__main__":
    main()
