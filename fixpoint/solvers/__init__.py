"""Solvers of z = phi(z), by class or by name."""

from fixpoint.solvers.adapters.scipy_adapter import SciPySolver
from fixpoint.solvers.adapters.torchdeq_adapter import TorchDEQSolver, register_torchdeq
from fixpoint.solvers.anderson import Anderson
from fixpoint.solvers.auto import Auto
from fixpoint.solvers.barzilai_borwein import BarzilaiBorwein
from fixpoint.solvers.base import IterativeSolver, Solver
from fixpoint.solvers.broyden import Broyden
from fixpoint.solvers.damped_picard import DampedPicard
from fixpoint.solvers.inexact_newton import InexactNewton
from fixpoint.solvers.levenberg_marquardt import LevenbergMarquardt
from fixpoint.solvers.newton import Newton
from fixpoint.solvers.picard import Picard
from fixpoint.solvers.registry import SOLVERS, make_solver
from fixpoint.solvers.squarem import SQUAREM

__all__ = [
    "SOLVERS",
    "SQUAREM",
    "Anderson",
    "Auto",
    "BarzilaiBorwein",
    "Broyden",
    "DampedPicard",
    "InexactNewton",
    "IterativeSolver",
    "LevenbergMarquardt",
    "Newton",
    "Picard",
    "SciPySolver",
    "Solver",
    "TorchDEQSolver",
    "make_solver",
    "register_torchdeq",
]
