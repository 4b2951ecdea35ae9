"""`fixpoint diagnose`: a trained model on its data, in words and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint.analysis import (
    class_distance_ratio,
    diagnose,
    evenly_spaced,
    gradient_norms,
    hidden_states,
    learned_eta,
    lyapunov_exponent,
)
from fixpoint.analysis.hidden_states import recurrent_layer
from fixpoint.models import ERNN
from fixpoint.models.rnn.base_layer import Recurrent
from fixpoint.solvers import InexactNewton
from fixpoint.training.commands.console import say
from fixpoint.training.commands.save_figure import save_figure
from fixpoint.training.evaluation_subset import Subset, subset
from fixpoint.training.loading import load_trained

WINDOWS = 16
"""Most windows along which the Lyapunov exponent is measured."""
SEEN = 64
"""Most windows whose gradients are computed; four times as many for distances of states."""
LOST = 1e-3
"""Below this ratio of first to last gradient norm it counts as vanished, above its inverse as
exploded."""
GRADIENTS = "Norm of the gradient of the loss by h_t over that by h_T, median of the windows."
DISCRIMINATION = (
    "Mean distance of two states of one class over that of two of different classes; 1: the states "
    "do not tell the classes apart."
)


class Finding(NamedTuple):
    """Sentences, and figures (`fixpoint.analysis.plots.Figure`) with captions by name of file."""

    sentences: tuple[str, ...] = ()
    figures: Mapping[str, tuple[Any, str]] = MappingProxyType({})


def diagnose_run(
    console: Console,
    path: Path,
    *,
    out: Path | None = None,
    part: str = "test",
    windows: int = 512,
    data: str | None = None,
    formats: Sequence[str] = ("png",),
) -> list[Path]:
    """Say and draw whether a trained model converges, on the data that it is for.

    Of an ERNN: the convergence condition, eta, the distance from equilibrium. Of any model: its
    score by class, gradients through time, how well its states tell the classes apart.

    Args:
        console: where to print.
        path: a folder or file of a training, see `load_trained`.
        out: folder of the figures; `diagnosis` in the folder of the training if not given.
        part: train, valid or test.
        windows: most windows of it to examine, evenly spaced.
        data: where the data are now, if they were moved.
        formats: of the figures, of png, pdf and svg.

    Returns:
        The figures' files.

    Raises:
        ValueError: there is no trained model, it is damaged, or the data have no such part.
        OSError: the file of the data is missing, or `out` cannot be written.
    """
    trained = load_trained(path, data=data)
    chosen = subset(trained, part, windows)
    folder = _made(out or trained.folder / "diagnosis")
    layer = recurrent_layer(trained.model)
    title = f"{trained.recipe.label} on {trained.data.name}: {trained.weights}"
    findings = [
        Finding((title, *chosen.sentences)),
        _equilibrium(layer, chosen),
        _memory(layer, chosen),
        _gradients(layer, chosen, trained.model),
        _classes(layer, chosen),
    ]
    for sentence in (sentence for finding in findings for sentence in finding.sentences):
        say(console, sentence)
    files = []
    for name, (figure, caption) in (item for f in findings for item in f.figures.items()):
        files += save_figure(
            figure,
            folder / name,
            formats,
            f"{caption} {trained.recipe.label}, {trained.data.name}.",
        )
    say(console, " ".join(["Figures:", *map(str, files)]))
    return files


def _equilibrium(layer: nn.Module, chosen: Subset) -> Finding:
    from fixpoint.analysis import plots

    if not isinstance(layer, ERNN):
        name = type(layer).__name__
        return Finding((f"{name} solves for no equilibrium: no condition is asked of it.",))
    diagnosis = diagnose(layer, chosen.features)
    figures = {"condition": (plots.diagnosis_figure(diagnosis), plots.CONDITION_CAPTION)}
    solver = layer.fixed_point.solver
    if isinstance(solver, InexactNewton) and len(learned_eta(layer)) > 1:
        figures["eta"] = (
            plots.eta_figure(learned_eta(layer)),
            "Learned eta over time with its least-squares line; crosses are negative values.",
        )
    if solver.has_tolerance:
        axes = plots.plot_updates(diagnosis.iterations, diagnosis.result)
        figures["solves"] = (
            plots.figure_of(axes),
            "Updates of the solve at each time step: median and range of the windows.",
        )
    return Finding(diagnosis.sentences, figures)


def _memory(layer: nn.Module, chosen: Subset) -> Finding:
    """Tell whether the state forgets, so that all time steps can be solved at once."""
    from fixpoint.analysis import plots

    if not isinstance(layer, Recurrent) or layer.num_layers > 1 or layer.bidirectional:
        return Finding()
    found = lyapunov_exponent(layer, chosen.features[evenly_spaced(len(chosen.y), WINDOWS)])
    caption = "Growth of a small change of the state along the data: median and range of windows."
    figure = plots.figure_of(plots.plot_growth(found))
    return Finding((found.sentence,), {"lyapunov": (figure, caption)})


def _gradients(layer: nn.Module, chosen: Subset, model: Any) -> Finding:
    from fixpoint.analysis import plots

    rows = evenly_spaced(len(chosen.y), SEEN)

    def loss(h: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(h), chosen.y[rows], reduction="sum")

    norms = gradient_norms(layer, chosen.features[rows], loss)
    left = (norms / norms[-1]).nanmedian(1)[0]
    if bool(left.isnan().any()):
        return Finding(("The loss has no gradient at these windows.",))
    first, most = left[0].item(), left.max().item()
    verdict = "neither vanishes nor explodes"
    if first < LOST:
        verdict = "vanishes"
    elif first > 1 / LOST:
        verdict = "explodes"
    between = f", up to {most:.2g} between" if most > 1.05 else ""
    sentence = (
        f"The gradient of the loss by h_t at t = 1 is {first:.2g} of that at t = {len(left)}"
        f"{between} (median of {len(rows)} windows): it {verdict}."
    )
    axes = plots.plot_gradient_norms({type(layer).__name__: norms})
    return Finding((sentence,), {"gradients": (plots.figure_of(axes), GRADIENTS)})


def _classes(layer: nn.Module, chosen: Subset) -> Finding:
    """Return how far apart states of one class are, and those of different classes."""
    from fixpoint.analysis import plots

    if not chosen.has_classes:
        return Finding()
    rows = evenly_spaced(len(chosen.y), 4 * SEEN)
    counts = chosen.y[rows].bincount()
    rows = rows[counts[chosen.y[rows]] > 1]  # pairs of a class
    if int((counts > 1).sum()) < 2:
        return Finding()
    ratio = class_distance_ratio(hidden_states(layer, chosen.features[rows]), chosen.y[rows])
    known = (~ratio.isnan()).nonzero().flatten().tolist()
    if not known:
        return Finding(("The states of all windows are equal.",))
    first, last = known[0], known[-1]
    sentence = (
        f"Two states of one class lie {ratio[first].item():.2f} times as far apart as two of "
        f"different classes at t = {first + 1}, and {ratio[last].item():.2f} times at "
        f"t = {last + 1}."
    )
    axes = plots.plot_discrimination({type(layer).__name__: ratio})
    return Finding((sentence,), {"discrimination": (plots.figure_of(axes), DISCRIMINATION)})


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written; {folder} cannot ({error.strerror}): give "
            "another one"
        ) from None
    return folder
