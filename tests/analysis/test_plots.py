"""The figure of the convergence condition: what it shows, and that it can be written."""

import matplotlib.image
import numpy as np
import pytest
import torch

from fixpoint import Picard, Result, solve
from fixpoint.analysis import (
    ContractionProfile,
    basins,
    contraction_profile,
    convergence_rate,
    diagnose,
    gradient_error,
    iteration_profile,
    lyapunov_exponent,
    parallel_iterations,
    parameter_drift,
    plots,
    residual_curves,
    trajectories,
)
from fixpoint.analysis.plots import style
from fixpoint.models import ERNN, LastStateClassifier
from fixpoint.solvers import SOLVERS
from fixpoint.training.history import record_training


def profile(K, *, infeasible=(), eta=0.1):
    """A `ContractionProfile` as lists: 4 time steps, K updates, 3 windows."""
    rng = np.random.default_rng(K)
    lower = np.zeros((4, K, 3))
    upper = 1 + rng.uniform(size=(4, K, 3))
    for t in infeasible:
        lower[t, :, 1] = upper[t, :, 1] = np.nan
    return {
        "t": [0, 10, 20, 30],
        "eta": np.full((4, K), eta).tolist(),
        "norm": (0.9 + 0.2 * rng.uniform(size=(4, K, 3))).tolist(),
        "lower": lower.tolist(),
        "upper": upper.tolist(),
    }


def record(K=1, *, label="inexact-newton K=1", **options):
    return {
        "label": label,
        "run": {"map": "jordan", "dataset": "har2-sample"},
        "contraction": {"before": profile(K), "after": profile(K, **options)},
    }


def texts(axes):
    return [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]


def test_one_column_for_each_update_of_each_record():
    figure = plots.contraction_figure([record(2), record(1, label="picard")])
    axes = figure.get_axes()
    assert len(axes) == 6
    top, bottom = axes[:3], axes[3:]
    assert [a.get_title() for a in top] == [
        "inexact-newton K=1, k=1",
        "inexact-newton K=1, k=2",
        "picard",
    ]
    for panel in top:
        assert panel.get_ylabel() == r"$\|I + \eta f'(h)\|_2$"
    for panel in bottom:
        assert panel.get_ylabel() == r"$\eta$"
        assert panel.get_xlabel() == "time step $t$"


def test_curves_are_the_medians_of_the_windows_and_the_line_at_one_is_marked():
    data = record(2)
    figure = plots.contraction_figure([data])
    for k, panel in enumerate(figure.get_axes()[:2]):
        lines = {line.get_label(): line for line in panel.get_lines()}
        for label, when in (("before training", "before"), ("after training", "after")):
            line = lines[label]
            np.testing.assert_array_equal(line.get_xdata(), [1, 11, 21, 31])
            norm = np.array(data["contraction"][when]["norm"])[:, k]
            np.testing.assert_allclose(line.get_ydata(), np.median(norm, 1))
        flat = [line for line in panel.get_lines() if list(line.get_ydata()) == [1, 1]]
        assert len(flat) == 1
        assert flat[0].get_linestyle() == "--"


def test_the_interval_is_that_of_all_windows_and_left_out_where_one_has_none():
    data = record(1, infeasible=(2,))
    panel = plots.contraction_figure([data]).get_axes()[1]
    handles, labels = panel.get_legend_handles_labels()
    assert labels == ["feasible", "no feasible $\\eta$", r"$\eta$ used"]
    np.testing.assert_array_equal(handles[1].get_xdata(), [21])
    # The band ends at the step without an interval; the step after it has no neighbor: a bar.
    (bars,) = [c for c in panel.collections if type(c).__name__ == "LineCollection"]
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    upper = np.array(data["contraction"]["after"]["upper"])[[3], 0]
    np.testing.assert_allclose(ends, np.stack([np.zeros(1), upper.min(1)], 1))
    assert plots.contraction_figure([record(1)]).get_axes()[1].get_legend_handles_labels()[1] == [
        "feasible",
        r"$\eta$ used",
    ]


def test_seeds_share_a_panel():
    """Windows of all seeds together, eta as its median in a band."""
    seeds = [record(1, eta=eta) for eta in (0.1, 0.2, 0.6)]
    seeds[0]["contraction"]["after"]["norm"][0][0][0] = 3.0
    seeds[1]["contraction"]["after"]["upper"][0][0][0] = 0.3
    figure = plots.contraction_figure([seeds, record(1, label="picard")])
    top, _, bottom, alone = figure.get_axes()
    assert top.dataLim.y1 == pytest.approx(3)
    (used,) = [line for line in bottom.get_lines() if line.get_label() == r"$\eta$ used"]
    np.testing.assert_allclose(used.get_ydata(), 0.2)
    feasible, band = (c.get_paths()[0].vertices[:, 1] for c in bottom.collections[::2])
    assert band.min() == pytest.approx(0.1)
    assert band.max() == pytest.approx(0.6)
    assert 0.3 in feasible.round(9)
    assert len(alone.collections) == len(bottom.collections) - 1


def test_a_profile_is_refused_with_the_function_for_it():
    layer = ERNN(9, 4, batch_first=True)
    model = LastStateClassifier(layer, 4, 2)
    x = torch.randn(2, 6, 9)
    given = contraction_profile(model, x)
    torch.testing.assert_close(given.norm, contraction_profile(layer, x).norm)
    with pytest.raises(TypeError, match=r"use plot_profile\(profile\)"):
        plots.contraction_figure(given)
    with pytest.raises(TypeError, match=r"use plot_profile\(profile\)"):
        plots.plot_contraction(given, given, given, 0)
    with pytest.raises(TypeError, match=r"use plot_profile\(profile\)"):
        plots.plot_contraction(given)
    with pytest.raises(TypeError, match="contraction_profile is for an ERNN; got LSTM"):
        contraction_profile(torch.nn.LSTM(9, 4), torch.randn(6, 2, 9))


STARTS = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}


@pytest.mark.parametrize("kind", STARTS)
def test_formats_for_a_paper(tmp_path, kind):
    """A PDF embeds TrueType fonts; captions lie beside the file; the bytes are reproducible."""
    paths = [tmp_path / f"{name}.{kind}" for name in ("a", "b")]
    for path in paths:
        plots.save(plots.contraction_figure([record(1)]), path, caption="What it shows.")
    content = paths[0].read_bytes()
    assert content.startswith(STARTS[kind])
    assert content == paths[1].read_bytes()
    assert (tmp_path / "a.txt").read_text() == "What it shows.\n"
    if kind == "pdf":
        assert b"/FontFile2" in content
        assert b"/Type3" not in content
    with pytest.raises(ValueError, match="unknown format 'eps': expected one of png, pdf, svg"):
        plots.save(plots.contraction_figure([record(1)]), tmp_path / "a.eps")


def test_a_legend_names_everything_once():
    figure = plots.contraction_figure([record(2, infeasible=(0,)), record(1, eta=-0.1)])
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(labels) == len(set(labels)) == 5


@pytest.mark.parametrize("infeasible", [(), (1,), (0, 1, 2, 3)])
def test_it_is_written_as_png_without_a_warning(tmp_path, infeasible):
    path = tmp_path / "contraction.png"
    plots.save(plots.contraction_figure([record(2, infeasible=infeasible, eta=-0.2)]), path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 600
    assert image.shape[1] > 700
    assert image[..., :3].std() > 0.05  # not blank


# Style.


def test_a_method_has_one_look_and_no_two_of_a_kind_share_it():
    for names in (SOLVERS, ("RNN", "LSTM", "GRU", "FastRNN", "FastGRNN", "ERNN K=1", "ERNN K=2")):
        looks = [plots.style_of(name) for name in names]
        assert len({spec["color"] for spec in looks}) == len(looks)
        assert len({spec["marker"] for spec in looks}) == len(looks)
        assert {spec["color"] for spec in looks} <= set(plots.COLORS.values())
    own = plots.style_of("my solver")
    assert own == plots.style_of("my solver")
    assert own["label"] == "my solver"


def test_given_axes_are_drawn_on_and_nothing_global_changes():
    before = dict(matplotlib.rcParams)
    axes = plots.panels(1, 2)
    assert plots.plot_equilibrium(axes[1]) is axes[1]
    assert not axes[0].get_lines()
    assert dict(matplotlib.rcParams) == before


def test_a_diagnosis_is_drawn_with_all_its_updates():
    x = torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(0))
    x[3, 1] = torch.nan
    figure = plots.diagnosis_figure(diagnose(ERNN(2, 3, max_iter=2, timesteps=6), x))
    assert len(figure.axes) == 4
    assert figure.axes[-1].get_xlabel() == "time step $t$"
    for axes in figure.axes:
        for line in axes.get_lines():
            assert np.isfinite(np.asarray(line.get_ydata(), dtype=float)).any()


# Numbers of the curves.


def curves(axes):
    return {
        line.get_label(): np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()
    }


def test_a_profile_is_drawn_as_median_with_negative_steps_marked():
    norm = torch.tensor([[[0.9, 0.8, 0.7]], [[1.2, 1.1, float("nan")]], [[0.5, 0.5, 0.5]]])
    eta = torch.tensor([[0.1], [-0.1], [0.2]])
    axes = plots.plot_profile(
        ContractionProfile(torch.tensor([0, 4, 9]), eta, norm, 0 * norm, 2 + 0 * norm)
    )
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_allclose(lines["$k = 1$"].get_ydata(), [0.8, 1.1, 0.5], rtol=1e-6)
    np.testing.assert_array_equal(lines["$k = 1$"].get_xdata(), [1, 5, 10])
    np.testing.assert_array_equal(lines[r"$\eta < 0$, $k = 1$"].get_xdata(), [5])


def test_epochs_and_iterations():
    def profile(value, K=2):
        norm = value + torch.zeros(1, K, 3)
        return ContractionProfile(torch.zeros(1), torch.full((1, K), 0.3), norm, 0 * norm, 2 * norm)

    given = curves(plots.plot_epochs([profile(0.5), profile(0.75), profile(1.5)]))
    np.testing.assert_allclose(given["median"], [0.5, 0.75, 1.5])
    drawn = plots.plot_drift({"RNN": parameter_drift(torch.rand(4, 3))})
    assert all(tick.is_integer() for tick in drawn.get_xticks().tolist())
    given = curves(plots.plot_iterations(profile(0.75, K=4)))
    np.testing.assert_allclose(given["largest feasible $\\eta$"], [1.5] * 4)
    np.testing.assert_allclose(given["$\\eta$ used"], [0.3] * 4, rtol=1e-6)


def test_gradient_norms_are_relative_and_skip_samples_without_a_gradient():
    norm = torch.tensor([[4.0, 6.0, 0.0], [2.0, 2.0, 0.0]])
    given = curves(plots.plot_gradient_norms({"RNN": norm}))
    np.testing.assert_allclose(given["RNN"], [2, 1])  # torch's median is the lower one


def test_a_data_profile_counts_what_was_solved():
    axes = plots.plot_data_profile({"picard": [10, 40, np.inf, 20], "newton": [np.inf] * 4})
    given = curves(axes)
    np.testing.assert_allclose(given["picard"], [25, 50, 75, 75])
    assert given["newton"].tolist() == [0]


def test_eta_and_its_line():
    axes = plots.plot_eta(torch.tensor([[0.3], [0.2], [0.1], [-0.1]]))
    labels = [line.get_label() for line in axes.get_lines()]
    assert "$\\eta_t < 0$" in labels
    assert "0.45 - 1.3e-01 $t$" in labels


def test_accuracy_that_was_not_recorded():
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    history = record_training(torch.nn.Linear(2, 2), x, (x[:, 0] > 0).long(), epochs=1)
    with pytest.raises(ValueError, match="the history of RNN has no accuracy: record it with test"):
        plots.plot_loss({"RNN": history}, accuracy=True)


def test_a_panel_for_each_update():
    figure = plots.eta_figure(torch.rand(5, 4, generator=torch.Generator().manual_seed(0)))
    titles = [axes.get_legend().get_title().get_text() for axes in figure.axes]
    assert titles == [f"$k = {k}$, $K = 4$" for k in (1, 2, 3, 4)]
    assert figure.get_size_inches()[0] == pytest.approx(3 * 3.3)


def test_updates_of_solves():
    iterations = torch.tensor([[3, 5, 4], [9, 2, 2]])
    result = torch.zeros(2, 3)
    assert list(curves(plots.plot_updates(iterations, result))) == ["median"]
    result[1, 0] = Result.MAX_ITER
    drawn = curves(plots.plot_updates(iterations, result))
    assert drawn["median"].tolist() == [4, 2]
    assert drawn["some window did not converge"].tolist() == [9]


def test_a_gap_next_to_nothing_is_drawn_by_its_size():
    assert plots.plot_gap(torch.full((4, 3), 1e-4)).get_yscale() == "log"
    assert plots.plot_gap(torch.full((4, 3), 0.5)).get_yscale() == "linear"
    assert plots.plot_gap(torch.zeros(4, 3)).get_yscale() == "linear"


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.4, 0.65, ["0.4", "0.5", "0.6"]),
        (0.03, 0.6, ["0.05", "0.1", "0.2", "0.5"]),
        (0.002, 90, ["0.01", "0.1", "1", "10"]),
        (1e-9, 1.5, None),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(low, high, shown):
    (axes,) = plots.panels()
    axes.plot([low, high])
    axes.set_ylim(low, high)
    style.log_y(axes)
    axes.figure.draw_without_rendering()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    inside = sorted((t.get_loc(), t.label1.get_text()) for t in ticks if low <= t.get_loc() <= high)
    texts = [text for _, text in inside if text]
    assert texts == shown if shown else "$" in texts[0]


def test_the_legend_of_the_updates_covers_no_curve():
    iterations = torch.arange(20)[:, None].expand(-1, 4) % 7
    axes = plots.plot_updates(iterations, torch.full((20, 4), int(Result.MAX_ITER)))
    plots.figure_of(axes).draw_without_rendering()
    assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())


def test_a_figure_has_at_most_three_columns_side_by_side():
    figure = plots.contraction_figure([record(2), record(2), record(1)])
    width, height = figure.get_size_inches()
    assert len(figure.get_axes()) == 10
    assert width < 10 < 2 * height
    titles = [axes.get_title() for axes in figure.get_axes() if axes.get_title()]
    assert len(titles) == 5


def test_a_cobweb_ends_at_the_fixed_point():
    path = trajectories(torch.cos, torch.zeros(1, 1, dtype=torch.float64), Picard(rtol=1e-8))
    _, graph, steps, start = plots.plot_cobweb(torch.cos, path).get_lines()
    corners = steps.get_xydata()
    assert corners[0].tolist() == corners[0, ::-1].tolist() == [0, 0]
    np.testing.assert_allclose(corners[1::2, 1], np.cos(corners[1::2, 0]))  # on the graph
    np.testing.assert_allclose(corners[1:-1:2, 1], corners[2::2, 0])  # level, as it is plain
    np.testing.assert_allclose(corners[-1], 0.7390851332151607, atol=1e-7)
    np.testing.assert_allclose(graph.get_ydata(), np.cos(graph.get_xdata()))
    assert start.get_xydata().tolist() == [[0, 0]]


def test_a_cobweb_of_two_numbers_is_refused():
    path = trajectories(torch.cos, torch.zeros(1, 2), Picard())
    with pytest.raises(ValueError, match=r"one sample of one number.*use plot_trajectories"):
        plots.plot_cobweb(torch.cos, path)


def test_a_notebook_shows_new_figures(monkeypatch):
    """In Jupyter a new figure is one of pyplot, shown below the cell; elsewhere it is not."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.close("all")
    plots.plot_equilibrium()
    assert pyplot.get_fignums() == []
    monkeypatch.setattr("builtins.get_ipython", lambda: None, raising=False)
    axes = plots.plot_equilibrium()
    assert pyplot.get_fignums() == [plots.figure_of(axes).number]
    pyplot.close("all")


class OnAnotherDevice(torch.Tensor):
    """A tensor that NumPy cannot read, like one on a GPU, until it is copied to main memory."""

    @classmethod
    def of(cls, tensor):
        return tensor.as_subclass(cls)

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def elsewhere(value):
    if isinstance(value, torch.Tensor):
        return OnAnotherDevice.of(value)
    if hasattr(value, "_fields"):
        return type(value)(*map(elsewhere, value))
    if isinstance(value, dict):
        return {name: elsewhere(part) for name, part in value.items()}
    return value


def results_of_analysis():
    torch.manual_seed(0)
    x, phi = torch.randn(20, 4, 9), lambda z: torch.tanh(2 * z)
    layer, solver = ERNN(9, 8), Picard(record="iterates")
    trace = solve(torch.cos, torch.zeros(1, 1), solver).trace
    a = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    z0 = torch.zeros(1, 1, dtype=torch.float64)
    found = diagnose(layer, x)
    history = record_training(torch.nn.Linear(2, 2), x[0, :, :2], torch.tensor([0, 1, 0, 1]))
    lengths = parallel_iterations(ERNN(9, 8), torch.randn(64, 2, 9), [16, 64])
    curves = residual_curves(torch.cos, torch.zeros(1, 1), {"picard": Picard()})
    return {
        "basins": (plots.plot_basins, basins(phi, "picard", size=6)),
        "cobweb": (lambda path: plots.plot_cobweb(torch.cos, path), z0.expand(3, 1, 1)),
        "diagnosis": (plots.diagnosis_figure, found),
        "discrimination": (plots.plot_discrimination, {"RNN": torch.rand(20)}),
        "drift": (plots.plot_drift, {"RNN": parameter_drift(torch.rand(5, 3))}),
        "epochs": (lambda profile: plots.plot_epochs([profile, profile]), found.profile),
        "eta": (plots.plot_eta, torch.rand(20, 1)),
        "gap": (plots.plot_gap, found.gap),
        "gradient error": (plots.plot_gradient_error, gradient_error(lambda z: a * z + 1, z0, [a])),
        "gradient norms": (plots.plot_gradient_norms, {"RNN": torch.rand(20, 4) + 1}),
        "growth": (plots.plot_growth, lyapunov_exponent(layer, x)),
        "iterations": (plots.plot_iterations, iteration_profile(torch.cos, trace, 1.0)),
        "loss": (plots.plot_loss, {"RNN": history}),
        "parallel": (plots.parallel_iterations_figure, lengths),
        "profile": (plots.plot_profile, found.profile),
        "rate": (plots.plot_rate, convergence_rate(trace, torch.cos)),
        "residuals": (plots.plot_residual_curves, curves),
        "spectrum": (plots.plot_jacobian_spectrum, torch.rand(20, 4, 8)),
        "trajectories": (plots.plot_trajectories, torch.rand(5, 3, 2)),
        "updates": (lambda n: plots.plot_updates(n, torch.zeros_like(n)), torch.ones(20, 4)),
    }


RESULTS = results_of_analysis()


@pytest.mark.parametrize("name", RESULTS)
def test_tensors_of_any_device_are_drawn(name):
    draw, result = RESULTS[name]
    axes = draw(elsewhere(result))
    figure = axes if isinstance(axes, plots.Figure) else plots.figure_of(axes)
    figure.draw_without_rendering()


def test_low_precision_and_tensors_with_a_graph_are_drawn():
    eta = torch.rand(20, 1, dtype=torch.bfloat16, requires_grad=True)
    assert len(plots.plot_eta(eta).get_lines()) > 0


@pytest.mark.parametrize(
    "classes", [("sit", "walk"), ("walking|walking_downstairs|standing", "walking_upstairs|laying")]
)
def test_the_classes_of_a_confusion_matrix_do_not_overlap(classes):
    figure = plots.confusion_figure([[9, 1], [2, 8]], classes)
    figure.canvas.draw()
    first, second = (text.get_window_extent() for text in figure.axes[0].get_xticklabels())
    assert not first.overlaps(second)
