"""Why a model converges or does not."""

from fixpoint.analysis.contraction import FeasibleEta, contraction, feasible_eta
from fixpoint.analysis.equilibrium import EXPANDING_BAND, equilibrium, equilibrium_derivative
from fixpoint.analysis.scalar import newton_steps, plain_steps, scalar_equilibrium
from fixpoint.analysis.sequence import ContractionProfile, contraction_profile, equilibrium_gap
from fixpoint.analysis.spectrum import spectral_radius

__all__ = [
    "EXPANDING_BAND",
    "ContractionProfile",
    "FeasibleEta",
    "contraction",
    "contraction_profile",
    "equilibrium",
    "equilibrium_derivative",
    "equilibrium_gap",
    "feasible_eta",
    "newton_steps",
    "plain_steps",
    "scalar_equilibrium",
    "spectral_radius",
]
