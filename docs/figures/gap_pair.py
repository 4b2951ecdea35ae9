import matplotlib.pyplot as plt
import torch

from fixpoint import Implicit, Picard
from fixpoint.analysis import diagnose, plots
from fixpoint.models import ERNN, SelfFeedbackMap

torch.manual_seed(0)
x = torch.randn(20, 30, 3)
solved = ERNN(
    3,
    16,
    map=SelfFeedbackMap(3, 16, bound=0.9),
    solver=Picard(rtol=1e-3),
    backward=Implicit(),
    batch_first=True,
)
stepped = ERNN(3, 16, rank=4, max_iter=1, batch_first=True)
for layer, title in ((solved, "at its equilibrium"), (stepped, "integrates its input")):
    _, axes = plt.subplots(figsize=(3.6, 3), layout="constrained")
    plots.plot_gap(diagnose(layer, x).gap, axes)
    axes.set_title(title)
