import matplotlib.pyplot as plt
import torch

from fixpoint import Picard
from fixpoint.analysis import plots, trajectories

start = torch.full((1, 1), 0.7, dtype=torch.float64)
for slope, title in ((-0.8, "converges"), (-1.2, "moves away")):

    def phi(z, slope=slope):
        return 0.8 + slope * (z - 0.8)

    _, axes = plt.subplots(figsize=(3.6, 3.6), layout="constrained")
    plots.plot_cobweb(phi, trajectories(phi, start, Picard(), max_iter=8), axes, box=(0.5, 1.1))
    axes.set_title(title, pad=25)
