import matplotlib.pyplot as plt
import torch

from fixpoint import Newton
from fixpoint.analysis import basins, plots


def phi(z):
    """Map z to z - (z^3 - 1), z = a + b i: three fixed points."""
    a, b = z[:, 0], z[:, 1]
    return torch.stack((a - (a**3 - 3 * a * b**2 - 1), b - (3 * a**2 * b - b**3)), 1)


_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
plots.plot_basins(basins(phi, Newton(max_iter=40), size=120), axes)
