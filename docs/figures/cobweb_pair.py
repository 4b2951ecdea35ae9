import matplotlib.pyplot as plt
import torch

from fixpoint import Picard
from fixpoint.analysis import plots, trajectories

start = torch.full((1, 1), 0.7, dtype=torch.float64)
_, axes = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
for panel, slope, title in zip(axes, (-0.8, -1.2), ("converges", "moves away"), strict=True):

    def phi(z, slope=slope):
        return 0.8 + slope * (z - 0.8)

    plots.plot_cobweb(phi, trajectories(phi, start, Picard(), max_iter=8), panel, box=(0.5, 1.1))
    panel.set_title(title, pad=25)
