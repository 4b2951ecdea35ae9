"""Fixed-point and implicit layers for PyTorch."""

from fixpoint.backward import Implicit, Phantom, Unrolled
from fixpoint.failure import ConvergenceWarning
from fixpoint.fixed_point import FixedPoint, solve
from fixpoint.regularization import jac_reg
from fixpoint.solution import (
    RESULT_TEXT,
    STALL_TEXT,
    ConvergenceError,
    Result,
    Solution,
    Stall,
    Trace,
)
from fixpoint.solvers import (
    SOLVERS,
    Anderson,
    BarzilaiBorwein,
    Broyden,
    InexactNewton,
    IterativeSolver,
    Newton,
    Picard,
    SciPySolver,
    Solver,
    TorchDEQSolver,
    make_solver,
    register_torchdeq,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "RESULT_TEXT",
    "SOLVERS",
    "STALL_TEXT",
    "Anderson",
    "BarzilaiBorwein",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "FixedPoint",
    "Implicit",
    "InexactNewton",
    "IterativeSolver",
    "Newton",
    "Phantom",
    "Picard",
    "Result",
    "SciPySolver",
    "Solution",
    "Solver",
    "Stall",
    "TorchDEQSolver",
    "Trace",
    "Unrolled",
    "__version__",
    "jac_reg",
    "make_solver",
    "register_torchdeq",
    "solve",
]
