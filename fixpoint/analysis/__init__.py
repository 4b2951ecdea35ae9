"""Why a model converges or does not."""

from fixpoint.analysis.contraction import FeasibleEta, contraction, feasible_eta
from fixpoint.analysis.sequence import ContractionProfile, contraction_profile, equilibrium_gap
from fixpoint.analysis.spectrum import spectral_radius

__all__ = [
    "ContractionProfile",
    "FeasibleEta",
    "contraction",
    "contraction_profile",
    "equilibrium_gap",
    "feasible_eta",
    "spectral_radius",
]
