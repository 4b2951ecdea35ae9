"""One run: a model made by a recipe, trained, measured and diagnosed."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lightning_fabric import Fabric
from torch import Tensor, nn

from fixpoint import Result, __version__
from fixpoint._denormals import without_denormals
from fixpoint.analysis import contraction_profile, equilibrium_gap, evenly_spaced
from fixpoint.analysis.gap_verdict import gap_quantiles
from fixpoint.data import Dataset
from fixpoint.models import (
    ERNN,
    LanguageModel,
    RecurrentDropout,
    model_size_kb,
    parameter_count,
)
from fixpoint.training.engine.checkpoint import Checkpoint
from fixpoint.training.engine.fit import Epoch, best_epoch, fit
from fixpoint.training.engine.memory import PeakMemory
from fixpoint.training.engine.model_factory import make_model
from fixpoint.training.engine.tasks import make_task
from fixpoint.training.recipe.schema import Machine, Recipe
from fixpoint.training.results.store import seconds_per_epoch

_NO_STATISTICS: dict[str, Any] = dict.fromkeys(
    ("mean_iterations", "mean_residual", "gap", "fraction_converged")
)


def build_model(recipe: Recipe, data: Dataset) -> nn.Module:
    """Return the untrained model of a recipe.

    Raises:
        ValueError: a name is unknown, or options do not go together.
        MemoryError: it does not fit into memory.

    Example:
        >>> from fixpoint.training import Recipe, build_model, prepare
        >>> recipe = Recipe().changed(hidden=8)
        >>> build_model(recipe, prepare(recipe).data)(prepare(recipe).data.x_test[:3]).shape
        torch.Size([3, 2])
    """
    with _fits_memory(recipe):
        return make_model(recipe.model, data, bptt=recipe.training.bptt)


def make_fabric(machine: Machine) -> Fabric:
    """Make the Fabric of the machine that a recipe describes.

    Raises:
        ValueError: there is no such device, or torchrun started another number of processes.
    """
    devices, machines = _layout(machine)
    if machine.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device and a CUDA build of torch: use cpu")
    if machine.device == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps needs an Apple GPU and macOS 12.3 or later: use cpu")
    if machine.device == "cpu" and machine.precision.startswith("16"):
        raise ValueError(
            f"--precision {machine.precision} needs a GPU: use bf16-mixed or 32-true on the cpu"
        )
    if machine.device == "cuda" and devices > torch.cuda.device_count():
        raise ValueError(
            f"--devices {devices} was asked for; this machine has "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return Fabric(
        accelerator=machine.device,
        devices=devices,
        num_nodes=machines,
        strategy="ddp" if machine.devices > 1 else "auto",
        precision=machine.precision,
    )


def _layout(machine: Machine) -> tuple[int, int]:
    """Return devices of each machine, and machines: as torchrun has started the processes, if it
    has.
    """
    available = torch.distributed.is_available()
    if not available or not torch.distributed.is_torchelastic_launched():
        return machine.devices, 1
    total, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if machine.devices != total:
        raise ValueError(
            f"torchrun started {total} processes, on all machines together: give --devices {total}"
        )
    return here, total // here


def run_experiment(
    recipe: Recipe,
    data: Dataset,
    report: Callable[[Epoch], None] = lambda epoch: None,
    *,
    folder: Path | None = None,
    fabric: Fabric | None = None,
) -> dict[str, Any]:
    """Train the model of a recipe and return its record, ready for JSON.

    Args:
        data: normalized, see `prepare`.
        report: called after each epoch, and for each epoch that was done before.
        folder: where to save after each epoch, and to resume from: one for each recipe and data.
        fabric: `make_fabric(recipe.machine)` if not given.

    Raises:
        ValueError: the folder has the checkpoint of another recipe or of other data.
    """
    fabric = fabric or make_fabric(recipe.machine)
    with _default_dtype(recipe.machine.precision), _fits_memory(recipe):
        return _run(recipe, data, report, folder, fabric)


@without_denormals
def _run(
    recipe: Recipe,
    data: Dataset,
    report: Callable[[Epoch], None],
    folder: Path | None,
    fabric: Fabric,
) -> dict[str, Any]:
    torch.manual_seed(recipe.training.seed)
    memory = PeakMemory(fabric.device)
    memory.start()
    model = fabric.to_device(build_model(recipe, data))
    task = make_task(fabric, data, recipe.training)
    probe = task.probe()
    windows, more = (probe[evenly_spaced(len(probe), n)] for n in (4, 64))
    before = _profile(model, windows)
    epochs = []
    for epoch in fit(
        fabric,
        model,
        task,
        recipe.training,
        checkpoint=Checkpoint(folder, _source(recipe, data)) if folder else None,
        observe=lambda: {**_of_epoch(model, more), "peak_memory_mib": memory.peak()},
    ):
        epochs.append(epoch)
        report(epoch)
    lost = not isfinite(epochs[-1].train_loss)
    after = None if lost else _profile(model, windows)
    return {
        "key": recipe.key,
        "run": recipe.flat,
        "label": recipe.label,
        **_summary(epochs, task.metric),
        "guessing_loss": task.guessing_loss(),
        **({} if lost else task.class_scores(model)),
        "notes": list(data.notes),
        "parameters": parameter_count(model),
        "size_kb": size_kb(model),
        **(_NO_STATISTICS if lost else _solve_statistics(model, probe)),
        "epochs": [e._asdict() for e in epochs],
        "contraction": {"before": before, "after": after} if before and after else None,
        "versions": {
            "fixpoint": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
        "device": str(fabric.device),
        "machine": platform.processor() or platform.machine(),
    }


def _source(recipe: Recipe, data: Dataset) -> dict[str, str | float]:
    """Return what tells a training from others; normalized values differ by rounding."""
    parts = [getattr(data, f"{name}_{part}") for part in data.parts for name in ("x", "y")]
    shapes = [tuple(part.shape) for part in parts]
    labels = b"".join(part.numpy().tobytes() for part in parts[1::2])
    told = sha256(labels + repr(shapes).encode()).hexdigest()
    norm = torch.linalg.vector_norm(data.x_train.float().nan_to_num(), dtype=torch.float64)
    return {"recipe": recipe.key, "labels or shapes": told, "x_train": norm.item()}


def _summary(epochs: list[Epoch], metric: str) -> dict[str, Any]:
    """Return scores of the last and the best epoch, and of the one that validation would choose."""
    values = [e.accuracy if metric == "accuracy" else e.perplexity for e in epochs]
    validated = epochs[-1].valid_score is not None
    memory = [e.peak_memory_mib for e in epochs if e.peak_memory_mib is not None]
    return {
        "metric": metric,
        f"{metric}_last": values[-1],
        f"{metric}_best": max(values, key=rank(metric)),
        f"{metric}_chosen": values[best_epoch(epochs, metric)] if validated else None,
        "loss": epochs[-1].train_loss,
        "seconds_per_epoch": seconds_per_epoch([e.seconds for e in epochs]),
        "peak_memory_mib": max(memory, default=None),
    }


@contextmanager
def _fits_memory(recipe: Recipe) -> Iterator[None]:
    """Raise a MemoryError that says what to do, where torch cannot allocate a tensor."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        text = str(error)
        known = (
            "can't allocate memory",
            "not enough memory",
            "out of memory",
            "overflow",
            "too big",
        )
        if not isinstance(error, MemoryError) and not any(k in text.lower() for k in known):
            raise
        raise MemoryError(
            f"not enough memory for model.hidden={recipe.model.hidden} and "
            f"training.batch_size={recipe.training.batch_size}: choose smaller ones"
        ) from None


@contextmanager
def _default_dtype(precision: str) -> Iterator[None]:
    """Set float64 as the default dtype where all is float64: outputs of Fabric are in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision == "64-true" else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def size_kb(model: nn.Module) -> float:
    """Return the size of a model in KB as the paper counts: without words' vectors, in or out."""
    return model_size_kb(model.layer if isinstance(model, LanguageModel) else model)


def tuned(
    recipe: Recipe,
    run: Callable[[Recipe], dict[str, Any]],
) -> tuple[Recipe, list[dict[str, Any]]]:
    """Choose the period of the halvings as the paper does, and give the recipe for all of train.

    Each of `training.halve_choices` is trained on the training part less the validation part; the
    best validation score over the epochs wins. The recipe returned has that period and no
    validation part. Without choices it is the recipe given.

    Args:
        run: trains a recipe and returns its record.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network, section
        on hyper-parameters.
    """
    choices = recipe.training.halve_choices
    if not choices:
        return recipe, []
    trials = []
    for period in choices:
        record = run(recipe.changed(halve_every=period, halve_choices=()))
        metric = record["metric"]
        history = [Epoch(**e) for e in record["epochs"]]
        score = history[best_epoch(history, metric)].valid_score
        trials.append({"halve_every": period, "valid_score": score, "key": record["key"]})
    best = max(trials, key=lambda trial: rank(metric)(trial["valid_score"]))
    final = recipe.changed(halve_every=best["halve_every"], halve_choices=(), validation=0.0)
    return final, trials


def rank(metric: str) -> Callable[[Any], float]:
    """Return a key by which better scores are larger; NaN is worst."""
    sign = -1 if metric == "perplexity" else 1
    return lambda value: -inf if value is None or value != value else sign * value


def _layer(model: nn.Module) -> nn.Module:
    layer: nn.Module = model.layer  # type: ignore[assignment]
    return layer.layer if isinstance(layer, RecurrentDropout) else layer


def _of_epoch(model: nn.Module, x: Tensor) -> dict[str, float | None]:
    statistics = _solve_statistics(model, x)
    return {"iterations": statistics["mean_iterations"], "residual": statistics["mean_residual"]}


@torch.no_grad()
def _solve_statistics(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Return how the solves of the model went, over all sequences of x and time steps."""
    layer = _layer(model)
    if not isinstance(layer, ERNN) or layer.num_layers > 1:
        return _NO_STATISTICS
    features = _features(model, x)
    path = layer.trajectory(features)
    gap = equilibrium_gap(layer.map, features.transpose(0, 1), path.output.transpose(0, 1))
    tolerance = layer.fixed_point.solver.has_tolerance
    converged = (path.result.cpu() == Result.CONVERGED).double().mean().item()
    return {
        "mean_iterations": path.iterations.cpu().double().mean().item(),
        "mean_residual": gap.nanmean().item(),
        "gap": (quantiles := gap_quantiles(gap)) and list(quantiles),
        "fraction_converged": converged if tolerance else None,
    }


@torch.no_grad()
def _profile(model: nn.Module, windows: Tensor) -> dict[str, Any] | None:
    layer = _layer(model)
    if not isinstance(layer, ERNN) or layer.num_layers > 1:
        return None
    try:
        profile = contraction_profile(layer, _features(model, windows))
    except torch.linalg.LinAlgError:  # weights so large that a decomposition fails
        return None
    lists = {name: part.tolist() for name, part in profile._asdict().items()}
    return {**lists, "fraction_holding": profile.fraction_holding}


def _features(model: nn.Module, x: Tensor) -> Tensor:
    """Return what the layer gets, in the dtype of its weights."""
    features: Tensor = model.features(x)  # type: ignore[operator]
    return features.to(next(_layer(model).parameters()).dtype)
