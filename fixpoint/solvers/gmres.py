"""GMRES for a batch of linear systems, restarted with its spaces kept, each sample by itself."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

Matvec = Callable[[Tensor], Tensor]
MAX_CYCLES = 10
FEW = 4
"""Products between two looks of the host at values of another device."""
MANY_BLOCKS = 16
"""Spaces of such a device that are kept before the host looks which of them still serve."""


class LinearResult(IntEnum):
    """Ending of the linear solve of one sample."""

    CONVERGED = 0
    MAX_ITER = 1
    STAGNATED = 2  # the residual remained within 1 % of its start over the whole solve
    BREAKDOWN = 3  # the Krylov space is exhausted, and the system singular on it
    NONFINITE = 4


class Block(NamedTuple):
    """Directions U with A U = C, C orthonormal, of one cycle, (B, j, D) each; a row may be 0."""

    U: Tensor
    C: Tensor


class LinearSolution(NamedTuple):
    """x, (B, D), its relative residual |b - A x| / |b|, `LinearResult`, and the spaces met.

    met: whether the host has read that all residuals are below their tolerances.
    """

    x: Tensor
    residual: Tensor  # (B,)
    result: Tensor  # (B,) int8
    blocks: tuple[Block, ...]
    met: bool = False


def gmres(
    matvec: Matvec,
    b: Tensor,
    *,
    rtol: Tensor,
    memory: int,
    blocks: tuple[Block, ...] = (),
    preconditioner: Matvec | None = None,
) -> LinearSolution:
    """Solve A x = b for each sample from x = 0, by cycles of at most `memory` products.

    Each cycle is preconditioned from the right by the directions of those before it, on which A
    is known: A M = I there, so that a restart loses nothing. `blocks` of an earlier solve with
    a similar A serve the same way. It stops once every sample is below its tolerance, after a
    cycle without progress, or after ten cycles. Whether is read from a device other than the CPU
    after as many products as the last cycle took, then after each few: samples that are done
    remain as they are.

    Args:
        matvec: A v of each sample, (B, D) -> (B, D).
        b: right-hand sides, (B, D).
        rtol: relative tolerance of each sample, (B,).
        memory: most products of a cycle, and most directions kept.
        blocks: those of an earlier solve.
        preconditioner: v -> an estimate of A^-1 v, (B, D) -> (B, D).

    Source: Saad and Schultz (1986), GMRES: a generalized minimal residual algorithm; de Sturler
        (1996), Nested Krylov methods based on GCR; Baker, Jessup, Manteuffel (2005), A technique
        for accelerating the convergence of restarted GMRES.
    """
    memory = min(memory, max(b.shape[1], 1))
    size = b.norm(dim=1)
    scale = torch.where(size > 0, size, 1.0)
    x, r = torch.zeros_like(b), b / scale[:, None]
    residual = torch.where(size > 0, 1.0, 0.0).to(b.dtype)
    result = torch.full_like(size, LinearResult.MAX_ITER, dtype=torch.int8)
    done = residual <= rtol
    at_once = b.is_cpu
    first = 1 if at_once else min(blocks[-1].C.shape[1] if blocks else FEW, memory)
    met = False
    for number in range(MAX_CYCLES):
        if (at_once or number) and bool(done.all()):
            break
        cycle = _Cycle(r, memory, done)
        ended = False
        for j in range(1, memory + 1):
            direction = _precondition(blocks, preconditioner, cycle.last)
            cycle.extend(direction, matvec(direction), rtol)
            looks = at_once or (j >= first and ((j - first) % FEW == 0 or j == memory))
            if looks and at_once:
                ended = bool(cycle.done.all())
            elif looks:
                below = torch.where(done, residual, cycle.residual) <= rtol
                ended, met = torch.stack((cycle.done.all(), below.all())).tolist()
            if ended:
                break
        step, rest, block = cycle.finish()
        x, r = x + step, torch.where(done[:, None], r, rest)
        blocks = _most_recent((*blocks, block), memory)
        slow = cycle.residual > 0.99 * residual
        residual = torch.where(done, residual, cycle.residual)
        result = torch.where(~done & slow, LinearResult.STAGNATED.value, result)
        result = torch.where(~done & cycle.spent, LinearResult.BREAKDOWN.value, result)
        if ended:  # then so are all samples
            break
        done = done | cycle.spent | slow | ~residual.isfinite() | (residual <= rtol)
    x = x * scale[:, None]
    result = torch.where(residual <= rtol, LinearResult.CONVERGED.value, result)
    finite = x.isfinite().all(1) & residual.isfinite()
    result = torch.where(finite, result, LinearResult.NONFINITE.value)
    return LinearSolution(x, residual, result, blocks, met)


class _Cycle:
    """One Krylov space from r, (B, D), by Arnoldi's method with Givens rotations.

    A Z = V H with Z = M V; V is orthogonalized twice by classical Gram-Schmidt, and the rotations
    G make R = G H upper triangular.
    """

    def __init__(self, r: Tensor, memory: int, done: Tensor) -> None:
        B, D = r.shape
        self.done = done
        self.spent = torch.zeros_like(done)
        self.size = r.norm(dim=1)
        self.residual = self.size
        self.V = r.new_zeros(B, memory + 1, D)
        self.Z = torch.zeros_like(self.V[:, 1:])
        self.V[:, 0] = r / torch.where(self.size > 0, self.size, 1.0)[:, None]
        self.G = torch.eye(memory + 1, dtype=r.dtype, device=r.device).repeat(B, 1, 1)
        self.R = r.new_zeros(B, memory, memory)
        self.used = torch.zeros_like(done, dtype=torch.int64)  # columns of each sample
        self.j = 0

    @property
    def last(self) -> Tensor:
        return self.V[:, self.j]

    def extend(self, direction: Tensor, w: Tensor, rtol: Tensor) -> None:
        """Take in M v of the last basis vector v, and w = A M v."""
        j, V = self.j, self.V[:, : self.j + 1]
        self.Z[:, j] = direction
        length = w.norm(dim=1)
        h = torch.zeros_like(V[:, :, 0])
        for _ in range(2):
            change = torch.einsum("bjd,bd->bj", V, w)
            w = w - torch.einsum("bjd,bj->bd", V, change)
            h = h + change
        rest = w.norm(dim=1)
        spent = ~self.done & (rest <= 10 * torch.finfo(w.dtype).eps * length)
        rest = torch.where(spent, 0.0, rest)
        self.V[:, j + 1] = w * torch.where(rest > 0, 1 / rest, 0.0)[:, None]
        column = torch.einsum("bij,bj->bi", self.G[:, : j + 1, : j + 1], h)
        # Not torch.hypot, whose last bit depends on the place in a tensor.
        pivot = (column[:, j].square() + rest.square()).sqrt()
        unit = torch.where(pivot > 0, pivot, 1.0)
        c, s = (column[:, j] / unit)[:, None], (rest / unit)[:, None]
        c = torch.where(pivot[:, None] > 0, c, 1.0)
        upper, lower = self.G[:, j].clone(), self.G[:, j + 1].clone()
        self.G[:, j], self.G[:, j + 1] = c * upper + s * lower, c * lower - s * upper
        self.R[:, :j, j], self.R[:, j, j] = column[:, :j], pivot
        self.used = torch.where(self.done, self.used, j + 1)
        error = self.size * self.G[:, j + 1, 0].abs()
        # A pivot of rounding size is a direction along which A does nothing.
        singular = ~self.done & (pivot <= _rounding(w.dtype) * length.clamp_min(1.0))
        spent = spent | singular
        error = torch.where(singular, self.residual, error)
        self.residual = torch.where(self.done, self.residual, error)
        self.spent = self.spent | spent
        self.done = self.done | spent | ~error.isfinite() | (error <= rtol)
        self.j += 1

    def finish(self) -> tuple[Tensor, Tensor, Block]:
        """Return the step in the space, (B, D), the residual after it, and the directions."""
        j = self.j
        diagonal = self.R.diagonal(dim1=1, dim2=2)[:, :j].abs()
        alive = diagonal > _rounding(diagonal.dtype) * diagonal.amax(1, keepdim=True)
        alive &= torch.arange(j, device=alive.device) < self.used[:, None]
        R = torch.where((alive[:, :, None] & alive[:, None, :]), self.R[:, :j, :j], 0.0)
        R = R + torch.diag_embed((~alive).to(R.dtype))
        target = torch.where(alive, self.size[:, None] * self.G[:, :j, 0], 0.0)
        C = torch.where(alive[:, :, None], self.G[:, :j, : j + 1] @ self.V[:, : j + 1], 0.0)
        Z = torch.where(alive[:, :, None], self.Z[:, :j], 0.0)
        U = torch.linalg.solve_triangular(R.mT, Z, upper=False)
        step = torch.einsum("bjd,bj->bd", U, target)
        r = self.V[:, 0] * self.size[:, None] - torch.einsum("bjd,bj->bd", C, target)
        return step, r, Block(U, C)


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative size below which a pivot is 0 up to rounding."""
    return 100 * torch.finfo(dtype).eps


def _precondition(blocks: tuple[Block, ...], base: Matvec | None, v: Tensor) -> Tensor:
    """Return M v, (B, D), with A M = I on the directions of the blocks, M the base elsewhere."""
    x = torch.zeros_like(v)
    for U, C in reversed(blocks):
        part = torch.einsum("bjd,bd->bj", C, v)
        x = x + torch.einsum("bjd,bj->bd", U, part)
        v = v - torch.einsum("bjd,bj->bd", C, part)
    return x + (v if base is None else base(v))


def _most_recent(blocks: tuple[Block, ...], memory: int) -> tuple[Block, ...]:
    """Return blocks without the oldest ones of samples that have more than `memory` directions."""
    if not blocks[0].U.is_cpu and len(blocks) <= MANY_BLOCKS:
        return blocks
    kept: tuple[Block, ...] = ()
    total = torch.zeros(len(blocks[0].U), device=blocks[0].U.device)
    for U, C in reversed(blocks):
        total = total + (C != 0).any(2).sum(1)
        within = total <= memory
        if not bool(within.any()):
            break
        kept += keep_rows(within, (Block(U, C),))
    return tuple(reversed(kept))


def keep_rows(kept: Tensor, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the blocks with the directions of other samples set to zero; kept is (B,) bool."""
    rows = kept[:, None, None]
    return tuple(Block(*(torch.where(rows, x, 0.0) for x in block)) for block in blocks)
