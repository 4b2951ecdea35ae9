"""Analysis of the convergence of a model."""

from fixpoint.analysis.basins import Basins, basins, trajectories
from fixpoint.analysis.contraction import (
    FeasibleEta,
    contraction,
    feasible_eta,
    infeasible_reason,
)
from fixpoint.analysis.contraction_profile import (
    ContractionProfile,
    contraction_profile,
    equilibrium_gap,
    learned_eta,
    least_squares_line,
)
from fixpoint.analysis.convergence_rate import ConvergenceRate, convergence_rate, iteration_profile
from fixpoint.analysis.diagnosis import Diagnosis, describe, diagnose
from fixpoint.analysis.evenly_spaced import evenly_spaced
from fixpoint.analysis.gradient_bias import GradientBias, gradient_bias
from fixpoint.analysis.hidden_states import gradient_norms, hidden_states, jacobian_spectrum
from fixpoint.analysis.lyapunov import LyapunovExponent, lyapunov_exponent
from fixpoint.analysis.parallel_iterations import ParallelIterations, parallel_iterations
from fixpoint.analysis.scalar.iteration import (
    scalar_equilibrium,
    tanh_newton_steps,
    tanh_plain_steps,
)
from fixpoint.analysis.scalar.tanh import (
    EXPANDING_BAND,
    tanh_equilibrium,
    tanh_equilibrium_derivative,
)
from fixpoint.analysis.spectrum import eigenvalues, spectral_radius
from fixpoint.analysis.training_history import (
    History,
    ParameterDrift,
    class_distance_ratio,
    discrimination,
    parameter_drift,
)
from fixpoint.analysis.work_precision import (
    GradientError,
    ResidualCurve,
    WorkPoint,
    gradient_error,
    residual_curves,
    work_precision,
)

__all__ = [
    "EXPANDING_BAND",
    "Basins",
    "ContractionProfile",
    "ConvergenceRate",
    "Diagnosis",
    "FeasibleEta",
    "GradientBias",
    "GradientError",
    "History",
    "LyapunovExponent",
    "ParallelIterations",
    "ParameterDrift",
    "ResidualCurve",
    "WorkPoint",
    "basins",
    "class_distance_ratio",
    "contraction",
    "contraction_profile",
    "convergence_rate",
    "describe",
    "diagnose",
    "discrimination",
    "eigenvalues",
    "equilibrium_gap",
    "evenly_spaced",
    "feasible_eta",
    "gradient_bias",
    "gradient_error",
    "gradient_norms",
    "hidden_states",
    "infeasible_reason",
    "iteration_profile",
    "jacobian_spectrum",
    "learned_eta",
    "least_squares_line",
    "lyapunov_exponent",
    "parallel_iterations",
    "parameter_drift",
    "residual_curves",
    "scalar_equilibrium",
    "spectral_radius",
    "tanh_equilibrium",
    "tanh_equilibrium_derivative",
    "tanh_newton_steps",
    "tanh_plain_steps",
    "trajectories",
    "work_precision",
]
