"""Every figure of the paper, and those of its analysis, each drawn from a fresh short run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint._messages import unknown_name
from fixpoint.analysis import plots
from fixpoint.analysis.basins import basins, trajectories
from fixpoint.analysis.contraction_profile import contraction_profile, learned_eta
from fixpoint.analysis.evenly_spaced import evenly_spaced
from fixpoint.analysis.hidden_states import gradient_norms, recurrent_layer
from fixpoint.analysis.plots import Figure
from fixpoint.analysis.training_history import History, discrimination, parameter_drift
from fixpoint.analysis.work_precision import gradient_error, residual_curves, work_precision
from fixpoint.models import ERNN, FastRNN, LastStateClassifier
from fixpoint.solvers import SOLVERS, InexactNewton, make_solver
from fixpoint.training.history import record_training


class Windows(Protocol):
    """A data set of sequences, as `fixpoint.data.Dataset`, normalized."""

    @property
    def name(self) -> str: ...
    @property
    def x_train(self) -> Tensor: ...
    @property
    def y_train(self) -> Tensor: ...
    @property
    def x_test(self) -> Tensor: ...
    @property
    def y_test(self) -> Tensor: ...
    @property
    def classes(self) -> tuple[str, ...]: ...


class Runs:
    """The trained models behind the figures, each trained once, when first needed.

    Args:
        data: windows for the figures on real data; None if only others are drawn.
        walks: toy walks (`fixpoint.data.sources.toy_walks`); None if only others are drawn.
        other: windows of another data set (DSA-19 in the paper) for learned eta; None leaves its
            panel out.
        epochs: of every training.
        hidden: units of the models on real data; 10 on the walks, as in the paper.
        seeds: of weights and order. `toy`, `real` and `second` hold the models of the first.
    """

    def __init__(
        self,
        data: Windows | None = None,
        walks: Windows | None = None,
        *,
        other: Windows | None = None,
        epochs: int = 25,
        hidden: int = 80,
        seeds: Sequence[int] = (0,),
    ) -> None:
        self.data, self.walks, self.other, self.epochs = data, walks, other, epochs
        self.hidden, self.seeds, self.seed = hidden, seeds, seeds[0]

    @cached_property
    def of_each_seed(self) -> list[Runs]:
        """These runs, and those of the further seeds."""

        def at(seed: int) -> Runs:
            return Runs(
                self.data,
                self.walks,
                other=self.other,
                epochs=self.epochs,
                hidden=self.hidden,
                seeds=(seed,),
            )

        return [self, *map(at, self.seeds[1:])]

    @cached_property
    def toy(self) -> dict[str, tuple[nn.Module, History]]:
        """RNN and the ERNN of Eq. val_h on the walks: as many weights each, plus eta."""
        data = self.toy_walks
        x, y, test = data.x_train, data.y_train, (data.x_test, data.y_test)

        def ernn() -> nn.Module:
            solver = InexactNewton(1, timesteps=x.shape[1])
            return ERNN(2, 10, map="identity-feedback", solver=solver, batch_first=True)

        layers = {"RNN": lambda: nn.RNN(2, 10, batch_first=True), "ERNN": ernn}
        train = partial(record_training, x=x, y=y, test=test, epochs=self.epochs, clip=1.0)
        return {name: self._train(make, 10, 2, train) for name, make in layers.items()}

    @cached_property
    def real(self) -> dict[str, tuple[nn.Module, History]]:
        """RNN, LSTM, FastRNN and ERNN with K = 1 and 2 on the windows."""
        data, n = self.windows, self.hidden
        d = data.x_train.shape[2]
        few = data.x_test[evenly_spaced(len(data.x_test), 4)]
        layers: dict[str, Callable[[], nn.Module]] = {
            "RNN": lambda: nn.RNN(d, n, batch_first=True),
            "LSTM": lambda: nn.LSTM(d, n, batch_first=True),
            "FastRNN": lambda: FastRNN(d, n, batch_first=True),
            "ERNN K=1": lambda: _ernn(data, n, 1),
            "ERNN K=2": lambda: _ernn(data, n, 2),
        }

        def watch(model: nn.Module) -> object:
            layer = model.layer
            return contraction_profile(layer, few, points=8) if isinstance(layer, ERNN) else None

        return {name: self._on(data, make, watch=watch) for name, make in layers.items()}

    @cached_property
    def second(self) -> dict[str, tuple[nn.Module, History]]:
        """ERNN with K = 1 on the other windows; nothing without them."""
        other = self.other
        if other is None:
            return {}
        return {"ERNN K=1": self._on(other, lambda: _ernn(other, self.hidden, 1))}

    def summary(self) -> list[str]:
        """Test accuracy after the last epoch of every model trained so far, a line a data set."""
        lines = []
        names = [getattr(data, "name", "") for data in (self.data, self.other)]
        for key, data in zip(("toy", "real", "second"), ("toy walks", *names), strict=True):
            trained = self.__dict__.get(key, {})  # a cached property that was used is there
            parts = [f"{n} {h.accuracy[-1]:.1f} %" for n, (_, h) in trained.items()]
            if parts:
                lines.append(
                    f"test accuracy on {data} after {self.epochs} epochs: {', '.join(parts)}"
                )
        return lines

    @property
    def windows(self) -> Windows:
        """The data, or an error that says what to pass."""
        if self.data is None:
            raise ValueError(
                "this figure needs real windows: build Runs(normalize(load_dataset('har2-sample')))"
            )
        return self.data

    @property
    def toy_walks(self) -> Windows:
        """The walks, or an error that says what to pass."""
        if self.walks is None:
            raise ValueError("this figure needs toy walks: build Runs(walks=toy_walks())")
        return self.walks

    def _on(
        self, data: Windows, make: Callable[[], nn.Module], **options: Any
    ) -> tuple[nn.Module, History]:
        """Return the model of a layer, trained on windows by the paper's protocol."""
        train = partial(
            record_training,
            x=data.x_train,
            y=data.y_train,
            test=(data.x_test, data.y_test),
            epochs=self.epochs,
            **options,
        )
        return self._train(make, self.hidden, len(data.classes), train)

    def _train(
        self,
        make: Callable[[], nn.Module],
        hidden: int,
        classes: int,
        train: Callable[..., History],
    ) -> tuple[nn.Module, History]:
        torch.manual_seed(self.seed)
        model = LastStateClassifier(make(), hidden, classes)
        return model, train(model, seed=self.seed)


def phi(runs: Runs) -> Figure:
    """Draw Phi and Phi' over alpha (figure derivativefig)."""
    return plots.figure_of(plots.plot_equilibrium())


def steps(runs: Runs) -> Figure:
    """Draw steps of plain, damped and Newton iteration to Phi(alpha), over alpha."""
    return plots.figure_of(plots.plot_steps())


def h1(runs: Runs) -> Figure:
    """Draw H1: parameter change over training on the walks (figure val, a)."""
    drifts = _by_name(runs, lambda run: run.toy, lambda _, h: parameter_drift(h.parameters))
    return plots.figure_of(plots.plot_drift(drifts))


def h2(runs: Runs) -> Figure:
    """Draw H2: discrimination of the states over time on test walks (figure val, b)."""
    data = runs.toy_walks
    few = evenly_spaced(len(data.x_test), 1000)
    x, y = data.x_test[few], data.y_test[few]
    ratios = _by_name(runs, lambda run: run.toy, lambda model, _: discrimination(model, x, y))
    return plots.figure_of(plots.plot_discrimination(ratios))


def h3(runs: Runs) -> Figure:
    """Draw H3: training loss on the walks (figure H3)."""
    histories = _by_name(runs, lambda run: run.toy, lambda _, history: history)
    return plots.figure_of(plots.plot_loss(histories))


def convergence(runs: Runs) -> Figure:
    """Draw training loss of the approaches on real windows (figure acc_vs_epoch_har_2)."""
    histories = _by_name(runs, lambda run: run.real, lambda _, history: history)
    return plots.figure_of(plots.plot_loss(histories, title=runs.windows.name))


def eta(runs: Runs) -> Figure:
    """Draw learned eta over time with its line, K = 1 and both updates of K = 2 (figure eta)."""
    first = runs.windows.name
    real = _by_name(runs, lambda run: run.real, _eta_of)
    second = _by_name(runs, lambda run: run.second, _eta_of)
    shown = [("K = 1", first, 0, real["ERNN K=1"])]
    shown += [("K = 1", str(runs.other and runs.other.name), 0, etas) for etas in second.values()]
    shown += [(f"k = {k + 1}, K = 2", first, k, real["ERNN K=2"]) for k in range(2)]
    axes = plots.panels(2, 2) if len(shown) == 4 else plots.panels(1, 3)
    for one, (title, data, k, etas) in zip(axes, shown, strict=True):
        plots.plot_eta(etas, one, k=k, title=f"${title}$, {data}")
    return plots.figure_of(axes[0])


def gradients(runs: Runs) -> Figure:
    """Draw |d loss / d h_t| over time of the models trained on real windows."""
    x, y = runs.windows.x_test[:64], runs.windows.y_test[:64]

    def norm(model: Any, _: History) -> Tensor:
        return gradient_norms(
            model, x, lambda h: F.cross_entropy(model.head(h), y, reduction="sum")
        )

    norms = _by_name(runs, lambda run: run.real, norm)
    return plots.figure_of(plots.plot_gradient_norms(norms))


def condition(runs: Runs) -> Figure:
    """Draw ||I + eta f'(h)|| over the training of ERNN with K = 1 and 2 on real windows."""
    axes = plots.panels(1, 2, sharey=True)
    for one, name in zip(axes, ("ERNN K=1", "ERNN K=2"), strict=True):
        watched = [run.real[name][1].watched for run in runs.of_each_seed]
        plots.plot_epochs(list(zip(*watched, strict=True)), one)
        plots.add_title(one, name)
    return plots.figure_of(axes[0])


def solvers(runs: Runs) -> Figure:
    """Draw residual and time of every solver on one equilibrium layer, tanh(U h + c), D = 64."""
    map_, z0 = _tanh_layer(runs.seed)
    chosen = {name: make_solver(name) for name in SOLVERS if name != "inexact-newton"}
    axes = plots.panels(1, 2)
    plots.plot_residual_curves(residual_curves(map_, z0, chosen, max_iter=100), axes[0])
    rtols = [10.0**-p for p in range(2, 13, 2)]
    points = work_precision(map_, z0, chosen, rtols=rtols, repeats=7)
    plots.plot_work_precision(points, axes[1], by="seconds")
    drawn = plots.figure_of(axes[0])
    plots.legend_below(drawn, axes, columns=5)  # of this many solvers it is as high as a panel
    return drawn


def gradient(runs: Runs) -> Figure:
    """Draw error of unrolled and implicit gradients against evaluations, on the same layer."""
    map_, z0 = _tanh_layer(runs.seed)
    weight = map_.keywords["U"].requires_grad_()
    rtols = [10.0**-p for p in range(1, 13)]
    error = gradient_error(map_, z0, [weight], steps=[1, 2, 4, 8, 16, 32, 64, 128], rtols=rtols)
    return plots.figure_of(plots.plot_gradient_error(error))


def basin(runs: Runs) -> Figure:
    """Draw basins of plain iteration and of Newton for two coupled units; pale: more updates."""
    axes = plots.panels(1, 2, sharey=True)
    starts = torch.tensor([[-1.6, 0.4], [0.3, 1.7], [1.5, -0.2]], dtype=torch.float64)
    known = None
    for one, name in zip(axes, ("picard", "newton"), strict=True):
        ends = basins(_two_units, make_solver(name, max_iter=200), size=150, roots=known)
        known = ends.roots
        plots.plot_basins(ends, one)
        solver = make_solver(name, rtol=1e-3)
        title = {"picard": "plain iteration", "newton": "Newton"}[name]
        path = trajectories(_two_units, starts, solver)
        plots.plot_trajectories(path, one, name=name, title=title)
    return plots.figure_of(axes[0])


PAPER = ("phi", "h1", "h2", "h3", "convergence", "eta")
"""Names of the figures that are in the paper."""

FIGURES: dict[str, Callable[[Runs], Figure]] = {
    "phi": phi,
    "steps": steps,
    "h1": h1,
    "h2": h2,
    "h3": h3,
    "convergence": convergence,
    "eta": eta,
    "gradients": gradients,
    "condition": condition,
    "solvers": solvers,
    "gradient-error": gradient,
    "basins": basin,
}
"""Every figure by its name; each function takes `Runs` alone."""


def figure(name: str, runs: Runs) -> Figure:
    """Return the figure of that name.

    Raises:
        ValueError: no figure has that name, or it needs data that `runs` lacks.

    Example:
        >>> from fixpoint.paper.figures import Runs, figure
        >>> figure("phi", Runs()).axes[0].get_xlabel()
        '$\\\\alpha$'
    """
    if name not in FIGURES:
        raise ValueError(unknown_name("figure", name, FIGURES))
    return FIGURES[name](runs)


def _by_name(
    runs: Runs,
    models: Callable[[Runs], Mapping[str, tuple[nn.Module, History]]],
    measure: Callable[[nn.Module, History], Any],
) -> dict[str, list[Any]]:
    """Return what is measured of each model, by its name, one value for each seed."""
    found = [models(run) for run in runs.of_each_seed]
    return {name: [measure(*trained[name]) for trained in found] for name in found[0]}


def _eta_of(model: nn.Module, _: History) -> Tensor | None:
    layer = recurrent_layer(model)
    return learned_eta(layer) if isinstance(layer, ERNN) else None


def _ernn(data: Windows, hidden: int, K: int) -> nn.Module:
    """Return the paper's benchmark layer for these windows."""
    steps, d = data.x_train.shape[1:]
    return ERNN(d, hidden, rank=8, max_iter=K, timesteps=steps, batch_first=True)


def _tanh_layer(seed: int) -> tuple[partial[Tensor], Tensor]:
    """Return tanh(U h + c) of 64 units, U symmetric with spectrum in [-0.98, 0.98], 8 samples,
    float64.
    """
    generator = torch.Generator().manual_seed(seed)
    U, _ = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=generator))
    U = 0.98 * U @ torch.diag(torch.linspace(-1, 1, 64, dtype=torch.float64)) @ U.mT
    c = 0.3 * torch.randn(8, 64, dtype=torch.float64, generator=generator)
    return partial(_tanh_map, U=U, c=c), torch.zeros(8, 64, dtype=torch.float64)


def _tanh_map(h: Tensor, U: Tensor, c: Tensor) -> Tensor:
    return torch.tanh(h @ U.mT + c)


def _two_units(z: Tensor) -> Tensor:
    """Return tanh(A z), two units that excite themselves and each other: 0 and two stable
    equilibria.
    """
    A = torch.tensor([[1.5, 0.6], [0.6, 1.1]], dtype=z.dtype)
    return torch.tanh(z @ A.mT)
