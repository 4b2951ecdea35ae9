"""Time a recurrence solved for all time steps at once against our own sequential paths.

A user's cell (a leaky step of four small operations, no fused path) against its Python loop, and
ERNN against its fused path and its reference loop. Minima of interleaved runs in one process, on
the CPU the processor time of one thread, which other processes disturb least.
Run: python benchmarks/sequence.py [--quick] [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from figures import Figures, add_options, device_name, synchronize
from torch import Tensor, nn

from fixpoint.models import ERNN, RecurrentCell
from fixpoint.models.rnn.parallel import ParallelForm
from fixpoint.sequence import LeakyJacobian

Run = Callable[[], object]
UNITS = 32
SHORT = 1.0  # s


class UserCell(RecurrentCell):
    """h' = (1 - eta) h + eta tanh(norm(W x + V h + b)): four small operations a step."""

    def __init__(self, input_size: int, hidden_size: int, *, eta: float, time: str) -> None:
        super().__init__(input_size, hidden_size, time=time)
        self.eta = eta
        self.W = nn.Linear(input_size, hidden_size)
        self.V = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm = nn.LayerNorm(hidden_size)

    def step(self, h: Tensor, u: Tensor) -> Tensor:
        return torch.lerp(h, torch.tanh(self.norm(u + self.V(h))), self.eta)

    def states(self, x: Tensor, h0: Tensor, *, last_only: bool) -> Tensor:
        h, states = h0, []
        for u in self.W(x).unbind(0):
            h = self.step(h, u)
            states.append(h)
        return h if last_only else torch.stack(states)

    def parallel_form(self, x: Tensor, h0: Tensor) -> ParallelForm:
        return ParallelForm(self.step, self.W(x), LeakyJacobian(1 - self.eta))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds, up to T = 1024")
    add_options(parser)
    options = parser.parse_args()
    device, figures = options.device, Figures(options.json)
    rounds, longest = (2, 1024) if options.quick else (3, 8192)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(device_name(device), torch.get_num_threads(), "threads")
    for eta in (0.01, 0.1):
        print(f"\nA user's cell, n = {UNITS}, eta = {eta}, {device}; ms")
        header()
        for T in (128, 1024, 8192):
            for B in (1, 16, 128):
                if longest >= T and T * B <= 2**17:
                    cells = {t: UserCell(8, UNITS, eta=eta, time=t) for t in MODES}
                    row = compare(cells, torch.randn(T, B, 8), UNITS, rounds, device)
                    figures.add(cell="user's", eta=eta, **row)
    for name in ("reference", "auto"):
        print(f"\nERNN, n = 80, eta = 0.01, implementation={name!r}, {device}; ms")
        header()
        for T, B in ((128, 1), (128, 16), (1024, 1)):
            layers = {t: ERNN(9, 80, rank=8, implementation=name, time=t).l0 for t in MODES}
            row = compare(layers, torch.randn(T, B, 9), 80, rounds, device)
            figures.add(cell="ERNN", implementation=name, **row)


MODES = ("sequential", "parallel", "auto")


def header() -> None:
    print(f"  {'':14}{'forward':^36}{'forward and backward':^36}")
    print(
        f"  {'T':>6}{'B':>6}  " + 2 * f"{'loop':>9}{'parallel':>10}{'ratio':>7}{'auto':>8}  ",
        end="",
    )
    print("updates")


def compare(
    cells: dict[str, RecurrentCell], x: Tensor, n: int, rounds: int, device: str
) -> dict[str, object]:
    """One row, printed: times of both paths, their quotient, and auto against the better."""
    state = cells["sequential"].state_dict()
    x, h0 = x.to(device), torch.zeros(x.shape[1], n, device=device)
    for cell in cells.values():
        cell.load_state_dict(state)
        cell.to(device)
    row = f"  {x.shape[0]:6}{x.shape[1]:6}  "
    figures: dict[str, object] = {"T": x.shape[0], "B": x.shape[1]}
    for kind in (inference, training):
        best = minima({t: kind(cell, x, h0) for t, cell in cells.items()}, rounds, device)
        loop, parallel, auto = (1e3 * best[t] for t in MODES)
        figures[f"{kind.__name__} ms"] = {t: round(1e3 * best[t], 3) for t in MODES}
        ratio, against = loop / parallel, auto / min(loop, parallel)
        row += f"{loop:9.1f}{parallel:10.1f}{ratio:6.1f}x{against:7.2f}x  "
    solution = cells["parallel"].time_solution
    assert solution is not None
    figures["updates"] = int(solution.iterations.max())
    print(row + f"{figures['updates']:7}", flush=True)
    return figures


def inference(cell: RecurrentCell, x: Tensor, h0: Tensor) -> Run:
    return torch.no_grad()(lambda: cell.sequence(x, h0))


def training(cell: RecurrentCell, x: Tensor, h0: Tensor) -> Run:
    def run() -> None:
        torch.autograd.grad(cell.sequence(x, h0).square().sum(), list(cell.parameters()))

    return run


def minima(runs: dict[str, Run], rounds: int, device: str) -> dict[str, float]:
    """Least time of each run in s, of `rounds` rounds and of more while all took less than SHORT.

    The order alternates: a run after a longer one begins with a cold cache.
    """
    best = dict.fromkeys(runs, float("inf"))
    clock = time.process_time if device == "cpu" else time.perf_counter
    for run in runs.values():
        run()
    spent, round_ = 0.0, 0
    while round_ < rounds or (spent < SHORT and round_ < 100):
        for name in list(runs)[:: -1 if round_ % 2 else 1]:
            synchronize(device)
            begin = clock()
            runs[name]()
            synchronize(device)
            taken = clock() - begin
            best[name] = min(best[name], taken)
            spent += taken
        round_ += 1
    return best


if __name__ == "__main__":
    main()
