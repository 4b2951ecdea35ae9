"""The zoo's programs: time, memory and lines of each, and its map by torchdeq's solver.

    python benchmarks/zoo.py [--only 07] [--seconds 5]

Each program of examples/zoo/ runs in a process of its own. The map that it has left, with the
weights that it has learned, is then solved and differentiated by its own layer and by torchdeq, at
the same tolerance: the ratio is that of the least times of runs taken by turns. Residuals are
rms(phi(z) - z) / rms(phi(z)), the largest of a batch.
"""

from __future__ import annotations

import argparse
import json
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchdeq
from figures import device_name
from torch import Tensor

from fixpoint import FixedPoint, Phantom
from fixpoint._tree import Packing, Tree
from fixpoint.models import frozen

ZOO = Path(__file__).parent.parent / "examples/zoo"
THEIR_SOLVER = {"Anderson": "anderson", "Broyden": "broyden", "Picard": "fixed_point_iter"}


class Case(NamedTuple):
    """A map, its start, the tensors that it is differentiated in, and the program's layer."""

    phi: Callable[[Tree], Tree]
    z0: Tree
    parameters: list[Tensor]
    layer: FixedPoint


def of_deq(deq: Any, x: Tree, z0: Tree | None = None, batched: bool = True) -> Case:
    """Return the map of a `DEQ` that injects x."""
    with frozen(deq.f) as still:
        z0 = deq._start(x, batched) if z0 is None else z0
        parameters = [p for p in deq.f.parameters() if p.requires_grad]
        return Case(lambda z: still(z, x), z0, parameters, deq.fixed_point)


def digits(n: dict[str, Any]) -> Case:
    with torch.no_grad():
        x = tuple(n["inject"][i](n["pool"](n["images"][:50], 2**i)) for i in range(3))
    return of_deq(n["deq"], x)


def transformer(n: dict[str, Any]) -> Case:
    model, windows = n["model"], n["data"].x_test[:63]
    with torch.no_grad():
        return of_deq(model.layer, model.embedded(windows))


def karate(n: dict[str, Any]) -> Case:
    case = of_deq(n["deq"], n["inputs"](n["given"]).detach(), torch.zeros(34, n["H"]))
    return case._replace(phi=lambda z: case.phi(z[0])[None], z0=case.z0[None])


def sudoku(n: dict[str, Any]) -> Case:
    torch.manual_seed(0)
    x = n["embed"](n["x"][:256]).detach()
    return of_deq(n["deq"], x, torch.randn(len(x), 16, n["H"]))


def sinkhorn(n: dict[str, Any]) -> Case:
    C, z0 = n["squares"] @ n["w"], torch.zeros(1, n["M"], dtype=torch.float64)
    return Case(lambda f: n["potentials"](f, C)[0], z0, [n["w"]], n["layer"])


def market(n: dict[str, Any]) -> Case:
    taxes = n["taxes"].requires_grad_()
    z0 = torch.zeros(len(taxes), 4, dtype=torch.float64)
    return Case(lambda z: n["phi"](z, taxes, n["SIGMA"]), z0, [taxes], n["layer"])


def named(n: dict[str, Any], parameter: str) -> Case:
    return Case(n["phi"], n["z0"], [n[parameter]], n["layer"])


CASES: dict[str, Callable[[dict[str, Any]], Case] | None] = {
    "01_multiscale_digits": digits,
    "02_transformer": transformer,
    "03_karate": karate,
    "04_neural_image": lambda n: of_deq(n["deq"], n["points"]),
    "05_sudoku": sudoku,
    "06_lasso": lambda n: named(n, "start"),
    "07_bratu": lambda n: named(n, "lambda_"),
    "08_sinkhorn": sinkhorn,
    "09_market": market,
    "10_scipy_cable": None,
    "11_charge_density": lambda n: named(n, "v"),
}
"""Of each program the case that it leaves; None where torchdeq has no such thing."""


def by_torchdeq(case: Case) -> Callable[[], Tree]:
    """Make the same solve by torchdeq."""
    solver, backward = case.layer.solver, case.layer.backward
    options: dict[str, Any] = {"ift": True}
    if isinstance(backward, Phantom):
        options = {"grad": backward.updates.max_iter, "tau": backward.updates.beta}
    name, tree = THEIR_SOLVER[type(solver).__name__], isinstance(case.z0, tuple)
    beta = getattr(solver, "beta", 1.0)
    deq = torchdeq.get_deq(
        f_solver=name, b_solver=name, f_max_iter=solver.max_iter, b_max_iter=solver.max_iter,
        f_tol=solver.rtol, b_tol=solver.rtol, f_stop_mode="rel", b_stop_mode="rel", **options,
    )  # fmt: skip
    kwargs = {} if name == "broyden" else {"tau": beta}

    def run() -> Tree:
        if tree:
            return tuple(deq(lambda *z: case.phi(z), list(case.z0), solver_kwargs=kwargs)[0][-1])
        return deq(case.phi, case.z0, solver_kwargs=kwargs)[0][-1]

    return run


def step(solve: Callable[[], Tree], parameters: list[Tensor]) -> Tree:
    """Solve once, with the gradient of the sum of squares of its solution."""
    z = solve()
    leaves = z if isinstance(z, tuple) else (z,)
    loss = sum((leaf.square().sum() for leaf in leaves), torch.tensor(0.0))
    torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return z


def residual(case: Case, z: Tree) -> float:
    packing = Packing(case.z0)
    with torch.no_grad():
        z = packing.pack(z)
        fz = packing.wrap(case.phi)(z)
    return ((fz - z).norm(dim=1) / fz.norm(dim=1)).max().item()


def compare(case: Case, seconds: float) -> dict[str, float]:
    """Measure the least times of both in ms, by turns, and their residuals."""
    contestants = {
        "ours": lambda: case.layer(case.phi, case.z0).z,
        "theirs": by_torchdeq(case),
    }
    found = {
        f"{name} residual": residual(case, step(run, case.parameters))
        for name, run in contestants.items()
    }
    least, end = dict.fromkeys(contestants, float("inf")), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in contestants.items():
            begin = time.perf_counter()
            step(run, case.parameters)
            least[name] = min(least[name], 1e3 * (time.perf_counter() - begin))
    return found | least


def measure(path: Path, seconds: float) -> dict[str, Any]:
    """Run one program in this process."""
    import matplotlib

    matplotlib.use("Agg")
    began = time.perf_counter()
    namespace = runpy.run_path(str(path), run_name="__main__")
    found: dict[str, Any] = {"seconds": time.perf_counter() - began}
    found["MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    make = CASES[path.stem]
    return found if make is None else found | compare(make(namespace), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name begins so")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each comparison")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        print(json.dumps(measure(options.here, options.seconds)))
        return
    print(f"{device_name('cpu')}, {torch.get_num_threads()} threads, torchdeq 0.1.0\n")
    print("| program | lines | s | MB | ours (ms) | torchdeq (ms) | ratio | residuals |")
    print("|---|---|---|---|---|---|---|---|")
    for path in sorted(ZOO.glob(f"{options.only}*.py")):
        command = [sys.executable, __file__, "--here", str(path), "--seconds", str(options.seconds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        lines = len(path.read_text(encoding="utf-8").splitlines())
        cells = [path.stem, lines, f"{found['seconds']:.0f}", f"{found['MB']:.0f}"]
        if "ours" in found:
            cells += [f"{found['ours']:.1f}", f"{found['theirs']:.1f}"]
            cells += [f"{found['ours'] / found['theirs']:.2f}"]
            cells += [f"{found['ours residual']:.0e}, {found['theirs residual']:.0e}"]
        print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
