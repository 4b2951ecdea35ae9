import matplotlib.pyplot as plt
import torch

from fixpoint import Anderson, Broyden, Picard
from fixpoint.analysis import plots, residual_curves

generator = torch.Generator().manual_seed(0)
A = torch.randn(20, 20, generator=generator, dtype=torch.float64)
A = -(A @ A.T) / torch.linalg.matrix_norm(A @ A.T, 2)  # eigenvalues from -1 to 0
start = torch.zeros(1, 20, dtype=torch.float64)
solvers = {"picard": Picard(), "anderson": Anderson(), "broyden": Broyden()}
for norm, title in ((0.9, "contraction"), (2.0, "no contraction")):
    curves = residual_curves(lambda z, U=norm * A: torch.tanh(z @ U) + 0.1, start, solvers)
    _, axes = plt.subplots(figsize=(3.6, 3.4), layout="constrained")
    plots.plot_residual_curves(curves, axes)
    axes.set_title(title, pad=35)
