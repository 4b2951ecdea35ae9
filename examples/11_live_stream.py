"""
Classify a live stream
======================

Train a FastGRNN, then read samples one by one, as a sensor gives them, with ``layer.step``.

Replace ``sensor`` by a generator of your samples: (9,), in the units of HAR-2.
"""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import torch

from fixpoint.data import load_dataset, normalize
from fixpoint.models import FastGRNN, LastStateClassifier
from fixpoint.training import record_training

EPOCHS = 10

torch.manual_seed(0)
data = normalize(load_dataset("har2-sample"), "asinh", late=True)
_, steps, channels = data.x_train.shape
model = LastStateClassifier(FastGRNN(channels, 16, batch_first=True), 16, len(data.classes))
x_train, x_test = data.inputs(data.x_train), data.inputs(data.x_test)
record_training(model, x_train, data.y_train, test=(x_test, data.y_test), epochs=EPOCHS)


def sensor() -> Iterator[torch.Tensor]:
    """Yield the samples (d,) of the first three test windows, one after the other."""
    yield from data.x_test[:3].flatten(0, 1)


state, history = None, []
with torch.no_grad():
    for count, sample in enumerate(sensor(), 1):
        output, state = model.layer.step(data.inputs(sample), state)
        scores = model.logits(output).softmax(-1)
        history.append(scores)
        if count % steps == 0:
            label = int(scores.argmax())
            print(f"sample {count}: {data.classes[label]} ({100 * scores[label]:.0f} %)")
            state = None  # the next window starts from 0, as in training

# %%
# The scores settle as each window goes by.
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.plot(torch.stack(history).flatten(1), label=[name.split("|")[0] for name in data.classes])
axes.set(xlabel="sample", ylabel="score")
axes.legend()
plt.show()
