import matplotlib.pyplot as plt

from fixpoint.analysis import plots

_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
plots.plot_equilibrium(axes)
