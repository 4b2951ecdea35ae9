import matplotlib.pyplot as plt
import torch

from fixpoint.analysis import gradient_norms, plots
from fixpoint.models import ERNN


def loss(h):
    return h.square().sum()


torch.manual_seed(0)
x = torch.randn(40, 16, 3)
layers = {"RNN": torch.nn.RNN(3, 16), "ERNN": ERNN(3, 16, rank=4)}
norms = {name: gradient_norms(layer, x, loss) for name, layer in layers.items()}
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
plots.plot_gradient_norms(norms, axes)
