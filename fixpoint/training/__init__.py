"""Training, and comparing what was trained."""

from fixpoint.training.fit import Epoch, evaluate, fit
from fixpoint.training.grid import make_grid
from fixpoint.training.run import Run, build, execute

__all__ = ["Epoch", "Run", "build", "evaluate", "execute", "fit", "make_grid"]
