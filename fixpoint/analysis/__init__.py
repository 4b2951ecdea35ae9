"""Why a model converges or does not."""

from fixpoint.analysis.contraction import FeasibleEta, contraction, feasible_eta
from fixpoint.analysis.sequence import ContractionProfile, contraction_profile, equilibrium_gap

__all__ = [
    "ContractionProfile",
    "FeasibleEta",
    "contraction",
    "contraction_profile",
    "equilibrium_gap",
    "feasible_eta",
]
