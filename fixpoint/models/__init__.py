"""Models built on fixed points, and what keeps their maps well-behaved."""

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
from fixpoint.models.deq import DEQ
from fixpoint.models.dropout import VariationalDropout
from fixpoint.models.ernn import ERNN
from fixpoint.models.fused import fused_scan, plain_scan
from fixpoint.models.holding import held
from fixpoint.models.language_model import LanguageModel
from fixpoint.models.norm_bound import contract
from fixpoint.models.recurrent_dropout import RecurrentDropout
from fixpoint.models.scan import Trajectory, check_pair, scan

__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "DEQ",
    "ERNN",
    "Cell",
    "IdentityFeedbackCell",
    "JordanCell",
    "LanguageModel",
    "LastStateClassifier",
    "LinearCell",
    "RecurrentDropout",
    "SelfFeedbackCell",
    "Trajectory",
    "VariationalDropout",
    "check_pair",
    "contract",
    "fused_scan",
    "held",
    "model_size_kb",
    "parameter_count",
    "plain_scan",
    "scan",
]
