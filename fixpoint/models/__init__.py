"""Recurrent models built on fixed points."""

from fixpoint.models.cells import (
    ACTIVATIONS,
    CELLS,
    Cell,
    IdentityFeedbackCell,
    JordanCell,
    LinearCell,
    SelfFeedbackCell,
)
from fixpoint.models.classifier import LastStateClassifier, model_size_kb, parameter_count
from fixpoint.models.ernn import ERNN
from fixpoint.models.scan import Trajectory, check_pair, scan

__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "ERNN",
    "Cell",
    "IdentityFeedbackCell",
    "JordanCell",
    "LastStateClassifier",
    "LinearCell",
    "SelfFeedbackCell",
    "Trajectory",
    "check_pair",
    "model_size_kb",
    "parameter_count",
    "scan",
]
