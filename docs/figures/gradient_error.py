import matplotlib.pyplot as plt
import torch

from fixpoint.analysis import gradient_error, plots

generator = torch.Generator().manual_seed(0)
U = torch.randn(20, 20, generator=generator, dtype=torch.float64)
U = (0.8 * U / torch.linalg.matrix_norm(U, 2)).requires_grad_()
x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
error = gradient_error(lambda z: torch.tanh(z @ U.T + x), torch.zeros_like(x), [U])
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
plots.plot_gradient_error(error, axes)
