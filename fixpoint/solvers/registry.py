"""The solvers by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fixpoint._messages import unknown_name
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
from fixpoint.solvers.squarem import SQUAREM

SOLVERS: dict[str, Callable[..., IterativeSolver]] = {
    "picard": Picard,
    "inexact-newton": InexactNewton,
    "anderson": Anderson,
    "broyden": Broyden,
    "barzilai-borwein": BarzilaiBorwein,
    "newton": Newton,
    "newton-krylov": partial(Newton, linear="gmres"),
    "levenberg-marquardt": LevenbergMarquardt,
    "squarem": SQUAREM,
    "damped-picard": DampedPicard,
    "auto": Auto,
}
"""Every solver by the name that the command line and `solve` take."""


def make_solver(solver: str | Solver, **options: Any) -> Solver:
    """Return the solver of that name with these options; a solver is returned as it is.

    Raises:
        ValueError: no solver has that name.
        TypeError: an option is unknown, or options come with a ready solver.

    Example:
        >>> from fixpoint import make_solver
        >>> make_solver("broyden", rtol=1e-4).rtol
        0.0001
    """
    if isinstance(solver, Solver):
        if options:
            raise TypeError(
                f"options {sorted(options)} were given with a ready solver; pass them to its class"
            )
        if not hasattr(solver, "max_iter"):
            raise TypeError(
                f"{type(solver).__name__} has no options: call super().__init__(**options) in its "
                "constructor"
            )
        return solver
    if isinstance(solver, type) and issubclass(solver, Solver):
        raise TypeError(
            f"solver is the class {solver.__name__}: give a ready one, {solver.__name__}()"
        )
    if not isinstance(solver, str):
        given = torch.typename(solver) if isinstance(solver, Tensor) else repr(solver)
        raise TypeError(f"solver must be a name or a Solver, as Anderson(); got {given}")
    if solver not in SOLVERS:
        raise ValueError(unknown_name("solver", solver, SOLVERS))
    return SOLVERS[solver](**options)
