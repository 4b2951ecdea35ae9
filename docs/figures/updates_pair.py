import matplotlib.pyplot as plt
import torch

from fixpoint import Implicit, Picard
from fixpoint.analysis import plots
from fixpoint.models import ERNN, SelfFeedbackMap

torch.manual_seed(0)
x = torch.randn(20, 30, 3)
for bound, title in ((0.5, "healthy"), (0.99, "out of budget")):
    phi = SelfFeedbackMap(3, 16, bound=bound)
    with torch.no_grad():  # as large as the bound allows
        phi.get_parameter(next(n for n, _ in phi.named_parameters() if "U" in n)).mul_(10)
    solver = Picard(rtol=1e-5, max_iter=15)
    layer = ERNN(3, 16, map=phi, solver=solver, backward=Implicit(), batch_first=True)
    with torch.no_grad():
        path = layer.trajectory(x)
    _, axes = plt.subplots(figsize=(3.8, 3.4), layout="constrained")
    plots.plot_updates(path.iterations, path.result, axes)
    axes.set_title(title, pad=40)
