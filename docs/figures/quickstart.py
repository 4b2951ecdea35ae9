import matplotlib.pyplot as plt
import torch

from fixpoint import Anderson, Broyden, Picard
from fixpoint.analysis import plots, residual_curves

generator = torch.Generator().manual_seed(0)
U = torch.randn(50, 50, generator=generator, dtype=torch.float64)
U = 0.98 * (U + U.T) / torch.linalg.matrix_norm(U + U.T, 2)
x = 0.1 * torch.randn(1, 50, generator=generator, dtype=torch.float64)
curves = residual_curves(
    lambda z: torch.tanh(z @ U.T + x),
    torch.zeros(1, 50, dtype=torch.float64),
    {"picard": Picard(), "anderson": Anderson(), "broyden": Broyden()},
)
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
plots.plot_residual_curves(curves, axes)
