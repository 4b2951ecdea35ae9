import matplotlib.pyplot as plt
import torch

from fixpoint.analysis import contraction_profile, plots
from fixpoint.models import ERNN

torch.manual_seed(0)
layer = ERNN(3, 16, rank=4, max_iter=2, timesteps=30, batch_first=True)
x = torch.randn(20, 30, 3)
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
plots.plot_profile(contraction_profile(layer, x), axes)
