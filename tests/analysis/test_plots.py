"""The figure of the convergence condition: what it shows, and that it can be written."""

import os
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from fixpoint.analysis import plots


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
        "run": {"cell": "jordan", "dataset": "har2-sample"},
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
        "inexact-newton K=1, k=1\njordan cell",
        "inexact-newton K=1, k=2\njordan cell",
        "picard\njordan cell",
    ]
    for panel in top:
        assert panel.get_ylabel() == r"$\|I + \eta f'(h)\|_2$"
    for panel in bottom:
        assert panel.get_ylabel() == r"$\eta$"
        assert panel.get_xlabel() == "time step $t$"
    assert "har2-sample" in figure.get_suptitle()


def test_curves_are_the_medians_of_the_windows_and_the_line_at_one_is_marked():
    data = record(2)
    figure = plots.contraction_figure([data])
    for k, panel in enumerate(figure.get_axes()[:2]):
        lines = {line.get_label(): line for line in panel.get_lines()}
        for label, when in (("before training", "before"), ("after", "after")):
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
    (bars,) = [c for c in panel.collections if type(c).__name__ == "LineCollection"]
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    upper = np.array(data["contraction"]["after"]["upper"])[[0, 1, 3], 0]
    np.testing.assert_allclose(ends, np.stack([np.zeros(3), upper.min(1)], 1))
    assert plots.contraction_figure([record(1)]).get_axes()[1].get_legend_handles_labels()[1] == [
        "feasible",
        r"$\eta$ used",
    ]


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


def test_it_needs_no_display():
    code = (
        "import sys; import fixpoint.analysis.plots; assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# Style.


def test_a_method_has_one_look_and_no_two_of_a_kind_share_it():
    from fixpoint.solvers import SOLVERS

    for names in (SOLVERS, ("RNN", "LSTM", "GRU", "FastRNN", "FastGRNN", "ERNN K=1", "ERNN K=2")):
        looks = [plots.style_of(name) for name in names]
        assert len({look["color"] for look in looks}) == len(looks)
        assert len({look["marker"] for look in looks}) == len(looks)
        assert {look["color"] for look in looks} <= set(plots.COLOURS.values())
    own = plots.style_of("my solver")
    assert own == plots.style_of("my solver")
    assert own["label"] == "my solver"


def test_given_axes_are_drawn_on_and_nothing_global_changes():
    import matplotlib

    before = dict(matplotlib.rcParams)
    axes = plots.panels(1, 2)
    assert plots.plot_equilibrium(axes[1]) is axes[1]
    assert not axes[0].get_lines()
    assert dict(matplotlib.rcParams) == before


def test_a_diagnosis_is_drawn_with_all_its_updates():
    import torch

    from fixpoint.analysis import diagnose
    from fixpoint.models import ERNN

    x = torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(0))
    x[3, 1] = torch.nan
    figure = plots.diagnosis_figure(diagnose(ERNN(2, 3, max_iter=2, timesteps=6), x))
    assert len(figure.axes) == 4
    assert figure.axes[-1].get_xlabel() == "time step $t$"
    for axes in figure.axes:
        for line in axes.get_lines():
            assert np.isfinite(np.asarray(line.get_ydata(), dtype=float)).any()
