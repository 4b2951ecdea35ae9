"""What the study of solvers measures on a trained model: time, memory, iterations, gradients."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint import Anderson, Implicit, InexactNewton, Picard, Result
from fixpoint.analysis.evenly_spaced import evenly_spaced
from fixpoint.backward import Backward
from fixpoint.data import Dataset
from fixpoint.models import ERNN, LastStateClassifier
from fixpoint.solvers import Solver
from fixpoint.training.engine.memory import PeakMemory
from fixpoint.training.engine.model_factory import BACKWARDS
from fixpoint.training.loading import load_trained

SWEPT_TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
BATCH, STEPS, WINDOWS = 128, 3, 64
"""Windows of a training step, steps that are timed, windows of the gradients."""


def measure(folder: Path, *, sweep: bool = False) -> dict[str, Any]:
    """Time and memory of a training step, iterations over time, and the error of the gradient.

    Args:
        folder: of a finished run of an ERNN.
        sweep: measure the gradient of other solvers, backwards and tolerances as well.

    Returns:
        seconds_per_epoch: batches of an epoch times the median of `STEPS` training steps.
        peak_memory_mib: of these steps, above what was held before.
        iterations: mean over test windows at each time step.
        gradient_error: see `gradient_error`, None where the model has no equilibrium.
        sweep: rows of solver, backward, rtol and gradient error.
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
        return {**found, "gradient_error": None, "sweep": []}
    model = trained.model.double()
    exact = tight_gradient(model, x.double(), y)
    own = (layer.fixed_point.solver, layer.fixed_point.backward)
    rows_of_sweep = _sweep(model, x.double(), y, exact) if sweep else []
    error = None if exact is None else gradient_error(model, x.double(), y, exact, *own)
    return {**found, "gradient_error": error, "sweep": rows_of_sweep}


def tight_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
    """Gradient of the loss at the equilibria, to rounding; None where they are not reached."""
    tight = Anderson(rtol=1e-11, atol=1e-13, max_iter=300)
    backward = Implicit()
    gradient = _gradient(model, x, y, tight, backward)
    layer: Any = with_solver(model, tight, Implicit()).layer
    with torch.no_grad():
        solved = layer.trajectory(x).result == Result.CONVERGED
    return gradient if bool(solved.all()) else None


def gradient_error(
    model: nn.Module, x: Tensor, y: Tensor, exact: Tensor, solver: Solver, backward: Backward
) -> float:
    """|g - exact| / |exact| of the gradient of the loss over all parameters."""
    g = _gradient(model, x, y, solver, backward)
    return float((g - exact).norm() / exact.norm())


def with_solver(model: nn.Module, solver: Solver, backward: Backward) -> LastStateClassifier:
    """The classifier with the same weights, whose equilibria are found and differentiated so."""
    layer: Any = model.layer
    cell = layer.cell
    head: Any = model.head
    other = ERNN(
        cell.input_size,
        cell.hidden_size,
        cell=cell,
        solver=solver,
        backward=backward,
        batch_first=True,
    )
    changed = LastStateClassifier(other, cell.hidden_size, head.out_features)
    changed.head = head
    return changed


def _gradient(model: nn.Module, x: Tensor, y: Tensor, solver: Solver, backward: Backward) -> Tensor:
    changed = with_solver(model, solver, backward)
    loss = F.cross_entropy(changed(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(changed.parameters()))])


def _sweep(model: nn.Module, x: Tensor, y: Tensor, exact: Tensor | None) -> list[list[Any]]:
    rows: list[list[Any]] = []
    pairs = [("picard", name) for name in BACKWARDS] + [("anderson", "implicit")]
    for solver, backward in pairs if exact is not None else []:
        kind = Picard if solver == "picard" else Anderson
        for rtol in SWEPT_TOLERANCES:
            own = kind(rtol=rtol, atol=0.1 * rtol, max_iter=100)
            error = gradient_error(model, x, y, exact, own, BACKWARDS[backward]())  # type: ignore[arg-type]
            rows.append([solver, backward, rtol, error])
    return rows


def _training_step(model: nn.Module, data: Dataset) -> dict[str, float | None]:
    """Forward, backward and update of a batch, once to warm up and then measured."""
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
