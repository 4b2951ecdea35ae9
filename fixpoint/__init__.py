"""Fixed-point and implicit layers for PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fixpoint.attach import attach_gradient
    from fixpoint.backward import Implicit, Phantom, Reversible, Unrolled
    from fixpoint.failure import ConvergenceWarning
    from fixpoint.fixed_point import FixedPoint, solve
    from fixpoint.regularization import jac_reg
    from fixpoint.resumable import ResumableSolve
    from fixpoint.root import Root, solve_root
    from fixpoint.rows import RowCheck, check_rows
    from fixpoint.solution import (
        RESULT_TEXT,
        STALL_TEXT,
        ConvergenceError,
        ErrorEstimate,
        Result,
        Solution,
        Stall,
        Trace,
    )
    from fixpoint.solvers import (
        SOLVERS,
        SQUAREM,
        Anderson,
        Auto,
        BarzilaiBorwein,
        Broyden,
        DampedPicard,
        InexactNewton,
        IterativeSolver,
        LevenbergMarquardt,
        Newton,
        Picard,
        SciPySolver,
        Solver,
        TorchDEQSolver,
        make_solver,
        register_torchdeq,
    )
    from fixpoint.starts import multi_start

__version__ = "0.1.0"

__all__ = [
    "RESULT_TEXT",
    "SOLVERS",
    "SQUAREM",
    "STALL_TEXT",
    "Anderson",
    "Auto",
    "BarzilaiBorwein",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "DampedPicard",
    "ErrorEstimate",
    "FixedPoint",
    "Implicit",
    "InexactNewton",
    "IterativeSolver",
    "LevenbergMarquardt",
    "Newton",
    "Phantom",
    "Picard",
    "Result",
    "ResumableSolve",
    "Reversible",
    "Root",
    "RowCheck",
    "SciPySolver",
    "Solution",
    "Solver",
    "Stall",
    "TorchDEQSolver",
    "Trace",
    "Unrolled",
    "__version__",
    "attach_gradient",
    "check_rows",
    "jac_reg",
    "make_solver",
    "multi_start",
    "register_torchdeq",
    "solve",
    "solve_root",
]

_PLACES = (
    "attach",
    "backward",
    "failure",
    "fixed_point",
    "regularization",
    "resumable",
    "root",
    "rows",
    "solution",
    "solvers",
    "starts",
)
"""Modules with the names of `__all__`."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line shows its help without torch."""
    if name in _PLACES:
        return import_module(f"fixpoint.{name}")
    for place in _PLACES if name in __all__ else ():
        module = import_module(f"fixpoint.{place}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module 'fixpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
