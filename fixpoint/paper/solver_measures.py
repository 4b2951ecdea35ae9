"""Measurements of the study of solvers on a trained model: time, memory, iterations, gradients."""

from __future__ import annotations

import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint import Implicit, InexactNewton, Newton, Result
from fixpoint.analysis.evenly_spaced import evenly_spaced
from fixpoint.backward import Backward
from fixpoint.data import Dataset
from fixpoint.models import ERNN, LastStateClassifier
from fixpoint.solvers import SOLVERS, Solver
from fixpoint.training.engine.memory import PeakMemory
from fixpoint.training.engine.model_factory import BACKWARDS
from fixpoint.training.loading import load_trained

GRID_TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
GRID_PAIRS = (
    *((solver, "implicit") for solver in ("picard", "anderson", "broyden")),
    ("picard", "unrolled"),
    ("picard", "phantom"),
)
"""Solvers and backwards that are measured on the weights of one model; Newton is too slow."""

BATCH, STEPS, WINDOWS = 128, 3, 32
"""Windows of a training step, steps that are timed, windows of the gradients."""


LOST: dict[str, Any] = {
    **dict.fromkeys(("seconds_per_epoch", "peak_memory_mib", "gradient_error")),
    **{"iterations": [], "grid": []},
}
"""Of a training that diverged in its first epoch, which has left no weights."""


def measure(folder: Path, *, grid: bool = False) -> dict[str, Any]:
    """Time and memory of a training step, iterations over time, and the error of the gradient.

    Args:
        folder: of a finished run of an ERNN.
        grid: measure other solvers, backwards and tolerances on the same weights as well.

    Returns:
        seconds_per_epoch: batches of an epoch times the median of `STEPS` training steps.
        peak_memory_mib: of these steps, above what was held before.
        iterations: mean over test windows at each time step.
        gradient_error: see `gradient_error`, None where the model has no equilibrium.
        grid: a row for each of `GRID_PAIRS` and `GRID_TOLERANCES`.
    """
    trained = load_trained(folder)
    data = trained.data
    rows = evenly_spaced(len(data.x_train), WINDOWS)
    x, y = data.inputs(data.x_train[rows]), data.y_train[rows]
    layer: ERNN = trained.model.layer
    with torch.no_grad():
        probe = data.inputs(data.x_test[evenly_spaced(len(data.x_test), WINDOWS)])
        iterations = layer.trajectory(probe).iterations.double().mean(1)
    found = {
        **_training_step(trained.model, data),
        "iterations": [round(value, 3) for value in iterations.tolist()],
    }
    if isinstance(layer.fixed_point.solver, InexactNewton):
        return {**found, "gradient_error": None, "grid": []}
    own = (layer.fixed_point.solver, layer.fixed_point.backward)
    exact_model = copy.deepcopy(trained.model).double()
    exact = tight_gradient(exact_model, x.double(), y)

    def error(solver: Solver, backward: Backward) -> float | None:
        if exact is None:
            return None
        return gradient_error(exact_model, x.double(), y, exact, solver, backward)

    measured: list[dict[str, Any]] = []
    for name, backward in GRID_PAIRS if grid else ():
        for rtol in GRID_TOLERANCES:
            solver = SOLVERS[name](rtol=rtol, atol=0.1 * rtol, max_iter=100)
            pair = solver, BACKWARDS[backward]()
            row = {"solver": name, "backward": backward, "rtol": rtol}
            model = with_solver(trained.model, *pair)
            measured.append({**row, **_solves(model, probe), **_training_step(model, data)})
            measured[-1]["gradient_error"] = error(*pair)
    return {**found, "gradient_error": error(*own), "grid": measured}


@torch.no_grad()
def _solves(model: nn.Module, x: Tensor) -> dict[str, float]:
    layer: Any = model.layer
    path = layer.trajectory(x)
    return {
        "mean_iterations": path.iterations.double().mean().item(),
        "fraction_converged": (path.result == Result.CONVERGED).double().mean().item(),
    }


def tight_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
    """Return the gradient of the loss at the equilibria, to rounding; None where they are not
    reached.
    """
    tight = Newton(rtol=1e-10, atol=1e-14, max_iter=30)
    gradient = _gradient(model, x, y, tight, Implicit())
    layer: Any = with_solver(model, tight, Implicit()).layer
    with torch.no_grad():
        solved = layer.trajectory(x).result == Result.CONVERGED
    return gradient if bool(solved.all()) else None


def gradient_error(
    model: nn.Module, x: Tensor, y: Tensor, exact: Tensor, solver: Solver, backward: Backward
) -> float:
    """Return |g - exact| / |exact| of the gradient of the loss over all parameters."""
    g = _gradient(model, x, y, solver, backward)
    return float((g - exact).norm() / exact.norm())


def with_solver(model: nn.Module, solver: Solver, backward: Backward) -> LastStateClassifier:
    """Return the classifier with the same weights, whose equilibria are found and differentiated
    so.
    """
    layer: Any = model.layer
    phi = layer.map
    head: Any = model.head
    other = ERNN(
        phi.input_size,
        phi.hidden_size,
        map=phi,
        solver=solver,
        backward=backward,
        batch_first=True,
    )
    changed = LastStateClassifier(other, phi.hidden_size, head.out_features)
    changed.head = head
    return changed


def _gradient(model: nn.Module, x: Tensor, y: Tensor, solver: Solver, backward: Backward) -> Tensor:
    changed = with_solver(model, solver, backward)
    loss = F.cross_entropy(changed(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(changed.parameters()))])


def _training_step(model: nn.Module, data: Dataset) -> dict[str, float | None]:
    """Measure forward, backward and update of a batch, after one to warm up."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    x, y = data.inputs(data.x_train[:BATCH]), data.y_train[:BATCH]
    memory, seconds = PeakMemory(x.device), []
    for step in range(STEPS + 1):
        if step == 1:
            memory.start()
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    batches = -(-len(data.x_train) // BATCH)
    return {
        "seconds_per_epoch": batches * statistics.median(seconds[1:]),
        "peak_memory_mib": memory.peak(),
    }
