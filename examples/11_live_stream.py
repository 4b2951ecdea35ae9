"""
Classify a live stream
======================

``python examples/11_live_stream.py --epochs 10`` trains a FastGRNN and then reads samples one by
one, as a sensor gives them, with ``layer.step``. Pipe a sensor into it with ``--stdin``: a line a
sample, nine values in the units of HAR-2.
"""

import argparse
import sys
from collections.abc import Iterator

import torch

from fixpoint.data import load_dataset, normalize
from fixpoint.models import FastGRNN, LastStateClassifier
from fixpoint.training import record_training

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--stdin", action="store_true")
options = parser.parse_args()
torch.manual_seed(0)
data = normalize(load_dataset("har2-sample"), "asinh", late=True)
_, steps, channels = data.x_train.shape
model = LastStateClassifier(FastGRNN(channels, 16, batch_first=True), 16, len(data.classes))
x_train, x_test = data.inputs(data.x_train), data.inputs(data.x_test)
record_training(model, x_train, data.y_train, test=(x_test, data.y_test), epochs=options.epochs)


def sensor() -> Iterator[torch.Tensor]:
    """Samples (d,): of standard input, or of the first test windows."""
    if options.stdin:
        for line in sys.stdin:
            yield torch.tensor([float(value) for value in line.replace(",", " ").split()])
    else:
        yield from data.x_test[:3].flatten(0, 1)


state = None
with torch.no_grad():
    for count, sample in enumerate(sensor(), 1):
        output, state = model.layer.step(data.inputs(sample), state)
        scores = model.logits(output).softmax(-1)
        if count % steps == 0:
            label = int(scores.argmax())
            print(f"sample {count}: {data.classes[label]} ({100 * scores[label]:.0f} %)")
            state = None  # the next window starts from 0, as in training
