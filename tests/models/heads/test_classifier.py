"""The classifier of the last state."""

import pytest
from torch import nn

from fixpoint.models import FastRNN, LastStateClassifier


@pytest.mark.parametrize(
    ("layer", "outputs"),
    [
        (FastRNN(3, 8, batch_first=True), 8),
        (FastRNN(3, 8, batch_first=True, bidirectional=True), 16),
        (nn.LSTM(3, 8, batch_first=True, proj_size=5), 5),
    ],
)
def test_another_number_of_outputs_is_refused_at_once(layer, outputs):
    LastStateClassifier(layer, outputs, 2)
    with pytest.raises(ValueError, match=f"has {outputs} outputs; got hidden_size=17: give"):
        LastStateClassifier(layer, 17, 2)


def test_a_layer_that_does_not_tell_its_size_is_taken():
    LastStateClassifier(nn.Identity(), 17, 2)
