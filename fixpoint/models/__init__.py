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
from fixpoint.models.ernn import ERNN, ERNNCell
from fixpoint.models.eurnn import EURNN, EURNNCell
from fixpoint.models.fastgrnn import FastGRNN, FastGRNNCell
from fixpoint.models.fastrnn import FastRNN, FastRNNCell
from fixpoint.models.fused import fused_scan, plain_scan
from fixpoint.models.gated import gated_scan, plain_gated_scan
from fixpoint.models.holding import held
from fixpoint.models.language_model import LanguageModel
from fixpoint.models.norm_bound import contract
from fixpoint.models.recurrent import Recurrent
from fixpoint.models.recurrent_cell import RecurrentCell
from fixpoint.models.recurrent_dropout import RecurrentDropout
from fixpoint.models.scan import Trajectory, check_pair, scan
from fixpoint.models.spectral import SpectralRNN, SpectralRNNCell
from fixpoint.models.ugrnn import UGRNN, UGRNNCell

__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "DEQ",
    "ERNN",
    "EURNN",
    "UGRNN",
    "Cell",
    "ERNNCell",
    "EURNNCell",
    "FastGRNN",
    "FastGRNNCell",
    "FastRNN",
    "FastRNNCell",
    "IdentityFeedbackCell",
    "JordanCell",
    "LanguageModel",
    "LastStateClassifier",
    "LinearCell",
    "Recurrent",
    "RecurrentCell",
    "RecurrentDropout",
    "SelfFeedbackCell",
    "SpectralRNN",
    "SpectralRNNCell",
    "Trajectory",
    "UGRNNCell",
    "VariationalDropout",
    "check_pair",
    "contract",
    "fused_scan",
    "gated_scan",
    "held",
    "model_size_kb",
    "parameter_count",
    "plain_gated_scan",
    "plain_scan",
    "scan",
]
