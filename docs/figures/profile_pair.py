import matplotlib.pyplot as plt
import torch

from fixpoint.analysis import contraction_profile, plots
from fixpoint.models import ERNN

torch.manual_seed(0)
x = torch.randn(20, 30, 3)
for eta, title in ((0.2, "healthy"), (-0.2, "unhealthy: eta < 0")):
    layer = ERNN(3, 16, rank=4, max_iter=1, batch_first=True)
    layer.fixed_point.solver.eta.data.fill_(eta)
    _, axes = plt.subplots(figsize=(3.6, 3), layout="constrained")
    plots.plot_profile(contraction_profile(layer, x), axes)
    axes.set(title=title, ylim=(0.5, 1.5))
