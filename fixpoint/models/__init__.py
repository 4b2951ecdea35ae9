"""Models built on fixed points, and means to keep their maps well-behaved."""

from fixpoint.models.deq.deq import DEQ
from fixpoint.models.deq.freezing import frozen
from fixpoint.models.deq.spectral_norm import bound_spectral_norm, normalize_weights
from fixpoint.models.deq.supervision import correction_loss, supervised_states
from fixpoint.models.deq.variational_dropout import VariationalDropout
from fixpoint.models.heads.classifier import LastStateClassifier, model_size_kb, parameter_count
from fixpoint.models.heads.language_model import LanguageModel
from fixpoint.models.heads.recurrent_dropout import RecurrentDropout
from fixpoint.models.initialization import identity_transition_, scale_recurrence_
from fixpoint.models.maps import (
    MAPS,
    EquilibriumMap,
    IdentityFeedbackMap,
    JordanMap,
    LinearMap,
    ManifoldMap,
    SelfFeedbackMap,
)
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.recurrence.gated import gated_scan, gated_scan_reference
from fixpoint.models.ops.recurrence.leaky import fused_scan, scan_reference
from fixpoint.models.rnn.base_cell import RecurrentCell
from fixpoint.models.rnn.base_layer import Recurrent, StreamState
from fixpoint.models.rnn.chrono import chrono_biases_
from fixpoint.models.rnn.ernn import ERNN, ERNNCell
from fixpoint.models.rnn.eurnn import EURNN, EURNNCell
from fixpoint.models.rnn.fastgrnn import FastGRNN, FastGRNNCell
from fixpoint.models.rnn.fastrnn import FastRNN, FastRNNCell
from fixpoint.models.rnn.scan import Trajectory, check_compatible, scan
from fixpoint.models.rnn.spectral import SpectralRNN, SpectralRNNCell
from fixpoint.models.rnn.torch_layers import GRU, LSTM, RNN
from fixpoint.models.rnn.ugrnn import UGRNN, UGRNNCell

__all__ = [
    "ACTIVATIONS",
    "DEQ",
    "ERNN",
    "EURNN",
    "GRU",
    "LSTM",
    "MAPS",
    "RNN",
    "UGRNN",
    "ERNNCell",
    "EURNNCell",
    "EquilibriumMap",
    "FastGRNN",
    "FastGRNNCell",
    "FastRNN",
    "FastRNNCell",
    "IdentityFeedbackMap",
    "JordanMap",
    "LanguageModel",
    "LastStateClassifier",
    "LinearMap",
    "ManifoldMap",
    "Recurrent",
    "RecurrentCell",
    "RecurrentDropout",
    "SelfFeedbackMap",
    "SpectralRNN",
    "SpectralRNNCell",
    "StreamState",
    "Trajectory",
    "UGRNNCell",
    "VariationalDropout",
    "bound_spectral_norm",
    "check_compatible",
    "chrono_biases_",
    "correction_loss",
    "frozen",
    "fused_scan",
    "gated_scan",
    "gated_scan_reference",
    "identity_transition_",
    "model_size_kb",
    "normalize_weights",
    "parameter_count",
    "scale_recurrence_",
    "scan",
    "scan_reference",
    "supervised_states",
]
