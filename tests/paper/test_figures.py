"""Every figure of the paper is drawn from a fresh run, at a small size, labelled and legible."""

from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch

from fixpoint.analysis import learned_eta, least_squares_line, plots
from fixpoint.data import load_dataset, normalize
from fixpoint.data.sources.toy_walks import toy_walks
from fixpoint.models import ERNN
from fixpoint.paper.figures import FIGURES, Runs, figure
from fixpoint.training import record_training


@pytest.fixture(scope="module")
def runs():
    """Two epochs on short windows: how a figure looks does not depend on more."""
    data = normalize(load_dataset("har2-sample"))
    short = replace(
        data,
        x_train=data.x_train[:96, ::8],
        y_train=data.y_train[:96],
        groups_train=None,
        x_test=data.x_test[:48, ::8],
        y_test=data.y_test[:48],
        groups_test=None,
    )
    other = replace(short, name="other", x_train=short.x_train[:, :9], x_test=short.x_test[:, :9])
    return Runs(short, toy_walks(walks=80), other=other, epochs=2, hidden=12)


FAST = [name for name in FIGURES if name not in ("solvers", "steps", "basins")]
COLUMNS = {"eta": 2, "condition": 2, "solvers": 2, "basins": 2}


@pytest.mark.parametrize("name", [*FAST, "basins"])
def test_it_has_labels_a_legend_and_the_size_of_a_column(name, runs, tmp_path):
    drawn = figure(name, runs)
    columns = COLUMNS.get(name, 1)
    assert drawn.get_size_inches()[0] == pytest.approx(3.3 * columns)
    for axes in drawn.get_axes():
        assert axes.get_xlabel()
        assert axes.get_legend() is not None
        assert 7 <= axes.xaxis.label.get_fontsize() <= 9
    assert drawn.get_axes()[0].get_ylabel()
    path = tmp_path / "figure.png"
    plots.save(drawn, path)
    image = matplotlib.image.imread(path)
    assert image.shape[1] == pytest.approx(3.3 * 150 * columns, abs=2)
    assert image[..., :3].std() > 0.05
    # Nothing covers a title.
    drawn.draw_without_rendering()
    for axes in drawn.get_axes():
        if axes.get_title():
            legend, title = axes.get_legend().get_window_extent(), axes.title.get_window_extent()
            assert not legend.overlaps(title)


def test_several_seeds_are_a_band_around_their_median(runs):
    several = Runs(runs.data, runs.walks, other=runs.other, epochs=1, hidden=4, seeds=(0, 1, 2))
    for name in ("h1", "h2", "h3"):
        axes = figure(name, several).get_axes()[0]
        assert len(axes.collections) == len(several.toy) == 2
    losses = [run.toy["RNN"][1].loss.numpy() for run in several.of_each_seed]
    assert not np.array_equal(losses[0], losses[1])
    axes = figure("h3", several).get_axes()[0]
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), np.median(losses, 0))
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(np.min(losses))
    assert band.max() == pytest.approx(np.max(losses))
    assert not figure("h3", Runs(walks=runs.walks, epochs=1)).get_axes()[0].collections


def test_models_are_trained_once(monkeypatch):
    trained = []

    def count(model, **options):
        trained.append(type(model.layer).__name__)
        return record_training(model, **options)

    monkeypatch.setattr("fixpoint.paper.figures.record_training", count)
    few = Runs(walks=toy_walks(walks=8), epochs=1)
    for name in ("h1", "h3", "h1"):
        figure(name, few)
    assert trained == ["RNN", "ERNN"]


def test_curves_are_the_numbers_of_the_runs(runs):
    lines = {line.get_label(): line for line in figure("h1", runs).get_axes()[0].get_lines()}
    for name, (_, history) in runs.toy.items():
        expected = (history.parameters - history.parameters[-1]).norm(dim=1)[1:]
        np.testing.assert_allclose(lines[name].get_ydata(), expected, rtol=1e-6)
    lines = {
        line.get_label(): line for line in figure("convergence", runs).get_axes()[0].get_lines()
    }
    assert list(lines) == ["RNN", "LSTM", "FastRNN", "ERNN K=1", "ERNN K=2"]
    for name, (_, history) in runs.real.items():
        np.testing.assert_array_equal(lines[name].get_ydata(), history.loss)


def test_eta_is_that_of_both_data_sets_and_both_updates(runs):
    drawn = figure("eta", runs).get_axes()
    titles = [axes.get_legend().get_title().get_text() for axes in drawn]
    name = runs.data.name
    assert titles == [
        f"${t}$, {n}"
        for t, n in zip(
            ("K = 1", "K = 1", "k = 1, K = 2", "k = 2, K = 2"),
            (name, "other", name, name),
            strict=True,
        )
    ]
    model = runs.second["ERNN K=1"][0]
    shown = np.concatenate([line.get_ydata() for line in drawn[1].get_lines()[:-2]])
    assert sorted(shown) == pytest.approx(sorted(learned_eta(model.layer)[:, 0].tolist()))
    alone = Runs(runs.data, epochs=1, hidden=4)
    alone.real = runs.real
    assert len(figure("eta", alone).get_axes()) == 3


def test_toy_models_have_as_many_weights_as_each_other(runs):
    """One eta a time step is all that the ERNN has more; torch's RNN has a second bias."""
    count = {n: sum(p.numel() for p in m.parameters()) for n, (m, _) in runs.toy.items()}
    assert count["ERNN"] - 100 == count["RNN"] - 10


def test_real_figures_need_data():
    with pytest.raises(ValueError, match="needs real windows: build Runs"):
        figure("eta", Runs())
    with pytest.raises(ValueError, match=r"needs toy walks: build Runs\(walks=toy_walks\(\)\)"):
        figure("h1", Runs())
    with pytest.raises(ValueError, match="unknown figure 'h4'"):
        figure("h4", Runs())


def test_summary_names_what_was_trained(runs):
    assert Runs().summary() == []
    assert runs.toy
    assert runs.second
    for name in ("toy walks", "other"):
        start = f"test accuracy on {name} after 2 epochs: "
        assert any(line.startswith(start) for line in runs.summary())


# Learned eta.


def test_the_line_is_that_of_numpy():
    eta = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    for k in range(2):
        expected = np.polyfit(np.arange(1, 51), eta[:, k].numpy().astype(float), 1)
        np.testing.assert_allclose(least_squares_line(eta)[k].numpy(), expected, rtol=1e-9)
    with pytest.raises(ValueError, match="a line needs two time steps; got 1"):
        least_squares_line(eta[:1])


def test_eta_of_layers():
    assert learned_eta(ERNN(2, 3, max_iter=2)).shape == (1, 2)
    layer = ERNN(2, 3, max_iter=2, timesteps=4)
    assert torch.equal(learned_eta(layer), layer.fixed_point.solver.eta.detach())
    with pytest.raises(TypeError, match="Anderson has no eta"):
        learned_eta(ERNN(2, 3, map="self-feedback", solver="anderson"))
