"""Recurrences solved for all time steps at once: parallel in time."""

from fixpoint.sequence.adjoint import SequenceAdjoint
from fixpoint.sequence.bound import leaky_error_bound
from fixpoint.sequence.jacobians import (
    DenseJacobian,
    DiagonalJacobian,
    LeakyJacobian,
    SequenceJacobian,
    ZeroJacobian,
)
from fixpoint.sequence.solve import solve_equilibrium_sequence, solve_sequence

__all__ = [
    "DenseJacobian",
    "DiagonalJacobian",
    "LeakyJacobian",
    "SequenceAdjoint",
    "SequenceJacobian",
    "ZeroJacobian",
    "leaky_error_bound",
    "solve_equilibrium_sequence",
    "solve_sequence",
]
