import matplotlib.pyplot as plt
import torch

from fixpoint.analysis import contraction_profile, plots
from fixpoint.models import ERNN

torch.manual_seed(0)
x = torch.randn(20, 30, 3)
_, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
for panel, eta, title in zip(axes, (0.2, -0.2), ("healthy", "unhealthy: eta < 0"), strict=True):
    layer = ERNN(3, 16, rank=4, max_iter=1, batch_first=True)
    layer.fixed_point.solver.eta.data.fill_(eta)
    plots.plot_profile(contraction_profile(layer, x), panel)
    panel.set(title=title, ylim=(0.5, 1.5))
