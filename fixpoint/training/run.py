"""One run: an ERNN with one solver and one backward, trained, measured and diagnosed."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from fixpoint import Implicit, Result, Unrolled, __version__, make_solver
from fixpoint.analysis import contraction_profile, equilibrium_gap
from fixpoint.backward import Backward
from fixpoint.data import Dataset, fingerprint
from fixpoint.models import CELLS, ERNN, LastStateClassifier, model_size_kb, parameter_count
from fixpoint.names import unknown_name
from fixpoint.solvers import SOLVERS
from fixpoint.training.fit import Epoch, fit
from fixpoint.training.memory import PeakMemory

BACKWARDS: dict[str, type[Backward]] = {"unrolled": Unrolled, "implicit": Implicit}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides the outcome of a run; see `execute`.

    solver: name in `SOLVERS`; max_iter: its updates (K for inexact-newton).
    cell: name in `CELLS`; rank of the Jordan cell's U, bound on ||U||_2 of the others.
    rtol: relative tolerance of solvers that have one; atol is a tenth of it.
    halve_every: epochs after which the learning rate is halved.
    """

    dataset: str
    solver: str
    max_iter: int
    backward: str
    cell: str
    hidden: int = 80
    rank: int = 8
    bound: float = 0.8
    rtol: float = 1e-3
    epochs: int
    batch_size: int = 128
    lr: float = 1e-2
    halve_every: int
    normalise: str = "column"
    seed: int = 0
    device: str = "cpu"

    @property
    def key(self) -> str:
        """Name of the run's configuration: equal runs have equal keys."""
        text = json.dumps(asdict(self), sort_keys=True) + fingerprint(self.dataset)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def has_tolerance(self) -> bool:
        return self.solver != "inexact-newton"

    @property
    def label(self) -> str:
        """Short name of the solver."""
        return self.solver if self.has_tolerance else f"{self.solver} K={self.max_iter}"


def build(run: Run, data: Dataset) -> LastStateClassifier:
    """The untrained model of a run.

    Raises:
        ValueError: a name is unknown, or cell, solver and backward do not fit.
    """
    for kind, name, known in (
        ("solver", run.solver, SOLVERS),
        ("backward", run.backward, BACKWARDS),
        ("cell", run.cell, CELLS),
    ):
        if name not in known:
            raise ValueError(unknown_name(kind, name, known))
    _, steps, channels = data.x_train.shape
    if run.has_tolerance:
        solver = make_solver(run.solver, max_iter=run.max_iter, rtol=run.rtol, atol=0.1 * run.rtol)
    else:
        solver = make_solver(run.solver, max_iter=run.max_iter, timesteps=steps)
    options: dict[str, Any] = {}
    if run.cell == "jordan":
        options = {"rank": run.rank}
    elif run.cell != "identity-feedback":
        options = {"bound": run.bound}
    cell = CELLS[run.cell](channels, run.hidden, **options)
    layer = ERNN(
        channels,
        run.hidden,
        cell=cell,
        solver=solver,
        backward=BACKWARDS[run.backward](),
        batch_first=True,
    )
    return LastStateClassifier(layer, run.hidden, len(data.classes))


def execute(
    run: Run, data: Dataset, report: Callable[[Epoch], None] = lambda epoch: None
) -> dict[str, Any]:
    """Train the model of a run on normalised data and return its record, ready for JSON."""
    fabric = Fabric(accelerator=run.device, devices=1)
    torch.manual_seed(run.seed)
    memory = PeakMemory(fabric.device)
    memory.start()
    model = build(run, data).to(fabric.device)
    windows = fabric.to_device(data.inputs(data.x_test[:: max(1, len(data.x_test) // 4)][:4]))
    before = _profile(model, windows)
    epochs = []
    for epoch in fit(
        fabric,
        model,
        data,
        epochs=run.epochs,
        batch_size=run.batch_size,
        lr=run.lr,
        halve_every=run.halve_every,
        seed=run.seed,
    ):
        epochs.append(epoch)
        report(epoch)
    peak = memory.peak()
    return {
        "key": run.key,
        "run": asdict(run),
        "label": run.label,
        "accuracy_last": epochs[-1].accuracy,
        "accuracy_best": max(e.accuracy for e in epochs),
        "loss": epochs[-1].train_loss,
        "seconds_per_epoch": sum(e.seconds for e in epochs) / len(epochs),
        "peak_memory_mib": peak,
        "parameters": parameter_count(model),
        "size_kb": model_size_kb(model),
        **_solve_statistics(model, fabric.to_device(data.inputs(data.x_test[:512]))),
        "epochs": [e._asdict() for e in epochs],
        "contraction": {"before": before, "after": _profile(model, windows)},
        "versions": {
            "fixpoint": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
        "device": str(fabric.device),
    }


@torch.no_grad()
def _solve_statistics(model: LastStateClassifier, x: Tensor) -> dict[str, float | None]:
    """How the solves of the trained model went, over all windows of x and time steps."""
    layer = model.layer
    path = layer.trajectory(x)
    gap = equilibrium_gap(layer.cell, x.transpose(0, 1), path.output.transpose(0, 1))
    tolerance = layer.fixed_point.solver.has_tolerance
    converged = (path.result == Result.CONVERGED).double().mean().item() if tolerance else None
    return {
        "mean_iterations": path.iterations.double().mean().item(),
        "mean_residual": gap.nanmean().item(),
        "share_converged": converged,
    }


def _profile(model: LastStateClassifier, windows: Tensor) -> dict[str, Any]:
    profile = contraction_profile(model.layer, windows)
    lists = {name: part.tolist() for name, part in profile._asdict().items()}
    return {**lists, "share_holding": profile.share_holding}
