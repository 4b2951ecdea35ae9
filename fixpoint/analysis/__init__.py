"""Why a model converges or does not."""

from fixpoint.analysis.contraction import (
    FeasibleEta,
    contraction,
    feasible_eta,
    infeasible_reason,
)
from fixpoint.analysis.equilibrium import EXPANDING_BAND, equilibrium, equilibrium_derivative
from fixpoint.analysis.rate import ConvergenceRate, convergence_rate, iteration_profile
from fixpoint.analysis.scalar import newton_steps, plain_steps, scalar_equilibrium
from fixpoint.analysis.sequence import ContractionProfile, contraction_profile, equilibrium_gap
from fixpoint.analysis.spectrum import eigenvalues, spectral_radius

__all__ = [
    "EXPANDING_BAND",
    "ContractionProfile",
    "ConvergenceRate",
    "FeasibleEta",
    "contraction",
    "contraction_profile",
    "convergence_rate",
    "eigenvalues",
    "equilibrium",
    "equilibrium_derivative",
    "equilibrium_gap",
    "feasible_eta",
    "infeasible_reason",
    "iteration_profile",
    "newton_steps",
    "plain_steps",
    "scalar_equilibrium",
    "spectral_radius",
]
