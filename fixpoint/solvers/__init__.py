"""Solvers of z = phi(z), by class or by name."""

from fixpoint.solvers.adapters.scipy_adapter import SciPySolver
from fixpoint.solvers.adapters.torchdeq_adapter import TorchDEQSolver, register_torchdeq
from fixpoint.solvers.anderson import Anderson
from fixpoint.solvers.barzilai_borwein import BarzilaiBorwein
from fixpoint.solvers.base import IterativeSolver, Solver
from fixpoint.solvers.broyden import Broyden
from fixpoint.solvers.inexact_newton import InexactNewton
from fixpoint.solvers.newton import Newton
from fixpoint.solvers.picard import Picard
from fixpoint.solvers.registry import SOLVERS, make_solver

__all__ = [
    "SOLVERS",
    "Anderson",
    "BarzilaiBorwein",
    "Broyden",
    "InexactNewton",
    "IterativeSolver",
    "Newton",
    "Picard",
    "SciPySolver",
    "Solver",
    "TorchDEQSolver",
    "make_solver",
    "register_torchdeq",
]
