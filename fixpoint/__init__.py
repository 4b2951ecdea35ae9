"""Fixed-point and implicit layers for PyTorch."""

from fixpoint.backward import Implicit, Phantom, Unrolled
from fixpoint.fixed_point import FixedPoint, solve
from fixpoint.solution import RESULT_TEXT, ConvergenceError, Result, Solution, Trace
from fixpoint.solvers import (
    SOLVERS,
    Anderson,
    BarzilaiBorwein,
    Broyden,
    InexactNewton,
    IterativeSolver,
    Newton,
    Picard,
    make_solver,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "RESULT_TEXT",
    "SOLVERS",
    "Anderson",
    "BarzilaiBorwein",
    "Broyden",
    "ConvergenceError",
    "FixedPoint",
    "Implicit",
    "InexactNewton",
    "IterativeSolver",
    "Newton",
    "Phantom",
    "Picard",
    "Result",
    "Solution",
    "Trace",
    "Unrolled",
    "__version__",
    "make_solver",
    "solve",
]
