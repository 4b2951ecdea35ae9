"""Figures: each function draws one result of `fixpoint.analysis` on the given or on new axes.

New axes belong to a new figure, which a notebook shows below its cell; elsewhere write it with
`save(figure_of(axes), "figure.png")`. Tensors may be on any device. Only this package loads
matplotlib; it sets nothing global.
"""

from fixpoint._messages import missing_extra

try:
    import matplotlib as _matplotlib  # noqa: F401
except ModuleNotFoundError:
    raise missing_extra("fixpoint.analysis.plots", "matplotlib", "bench") from None

from fixpoint.analysis.plots.cobweb import plot_cobweb
from fixpoint.analysis.plots.condition import (
    CONDITION_CAPTION,
    CONTRACTION_CAPTION,
    contraction_figure,
    diagnosis_figure,
    plot_contraction,
    plot_epochs,
    plot_feasible_eta,
    plot_gap,
    plot_iterations,
    plot_profile,
    plot_rate,
)
from fixpoint.analysis.plots.confusion import confusion_figure
from fixpoint.analysis.plots.gradient_bias import plot_gradient_bias
from fixpoint.analysis.plots.parallel import parallel_iterations_figure, plot_growth
from fixpoint.analysis.plots.scalar import plot_equilibrium, plot_steps
from fixpoint.analysis.plots.solver_study import (
    STUDY_FIGURES,
    accuracy_figure,
    gradient_figure,
    iterations_figure,
)
from fixpoint.analysis.plots.solvers import (
    plot_basins,
    plot_data_profile,
    plot_gradient_error,
    plot_residual_curves,
    plot_trajectories,
    plot_work_precision,
)
from fixpoint.analysis.plots.style import (
    COLORS,
    FORMATS,
    METHODS,
    Figure,
    add_legend,
    add_title,
    figure_of,
    legend_below,
    panel,
    panels,
    save,
    style_of,
)
from fixpoint.analysis.plots.trained_models import (
    eta_figure,
    plot_discrimination,
    plot_drift,
    plot_eta,
    plot_gradient_norms,
    plot_jacobian_spectrum,
    plot_loss,
)
from fixpoint.analysis.plots.trajectory import plot_updates

__all__ = [
    "COLORS",
    "CONDITION_CAPTION",
    "CONTRACTION_CAPTION",
    "FORMATS",
    "METHODS",
    "STUDY_FIGURES",
    "Figure",
    "accuracy_figure",
    "add_legend",
    "add_title",
    "confusion_figure",
    "contraction_figure",
    "diagnosis_figure",
    "eta_figure",
    "figure_of",
    "gradient_figure",
    "iterations_figure",
    "legend_below",
    "panel",
    "panels",
    "parallel_iterations_figure",
    "plot_basins",
    "plot_cobweb",
    "plot_contraction",
    "plot_data_profile",
    "plot_discrimination",
    "plot_drift",
    "plot_epochs",
    "plot_equilibrium",
    "plot_eta",
    "plot_feasible_eta",
    "plot_gap",
    "plot_gradient_bias",
    "plot_gradient_error",
    "plot_gradient_norms",
    "plot_growth",
    "plot_iterations",
    "plot_jacobian_spectrum",
    "plot_loss",
    "plot_profile",
    "plot_rate",
    "plot_residual_curves",
    "plot_steps",
    "plot_trajectories",
    "plot_updates",
    "plot_work_precision",
    "save",
    "style_of",
]
