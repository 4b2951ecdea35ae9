"""Test that the samples of a batch are independent under a map."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint._tree import Map, Packing, Tree
from fixpoint._validation import positive

NOISE = 100.0
"""Units in the last place by which values may differ that are the same."""


class RowCheck(NamedTuple):
    """The result of `check_rows`.

    repeats: whether phi gives the same values when it is evaluated again.
    coupled: samples whose phi(z) depends on other samples, (B,) bool.

    Example:
        >>> import torch
        >>> from fixpoint import check_rows
        >>> check_rows(lambda z: 0.5 * z + 1, torch.zeros(3, 2)).independent
        True
    """

    repeats: bool
    coupled: Tensor

    @property
    def independent(self) -> bool:
        """True if no sample depends on another one, and phi repeats itself."""
        return self.repeats and not bool(self.coupled.any())

    def describe(self) -> str:
        """Return the finding and its remedy in a sentence."""
        if not self.repeats:
            return (
                "phi gives other values when it is evaluated again: freeze what is random in it "
                "(fixpoint.models.frozen, VariationalDropout)"
            )
        rows = self.coupled.nonzero().flatten().tolist()
        if not rows:
            return f"all {len(self.coupled)} samples are independent"
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        return (
            f"{len(rows)} of {len(self.coupled)} samples depend on others ({shown}): solve the "
            "batch as one with batched=False"
        )


def check_rows(phi: Map, z: Tree, *, size: float = 0.1, groups: Tensor | None = None) -> RowCheck:
    """Find samples whose phi(z) depends on other samples, as by batch normalization or a graph.

    Samples are solved each to its own tolerance, which is right only where they are independent.
    Groups of samples are perturbed, and the others observed; 2 log2(B) + 2 evaluations of phi tell
    for each sample whether any other one matters to it. Dependence that phi has elsewhere than at
    z, as behind a branch, is not found.

    Args:
        phi: map of a tree like z to one of the same structure, shapes and dtype.
        z: tensor, or nested tuple, list or dict of tensors, each (B, ...).
        size: of the perturbations, relative to the root mean square of z, or absolute where z is 0.
        groups: numbers of the sample of each row, as for `solve`; samples are then groups.

    Example:
        >>> import torch
        >>> from fixpoint import check_rows
        >>> phi = lambda z: torch.stack([0.5 * z[1] + 1, 0.3 * z[0], 0.1 * z[2]])
        >>> check_rows(phi, torch.zeros(3, 1)).describe()
        '2 of 3 samples depend on others (0, 1): solve the batch as one with batched=False'
    """
    packing = Packing(z, groups=groups)
    packed = packing.wrap(phi)
    with torch.no_grad():
        start = packing.start(z)
        fz = packed(start)
        rounding = NOISE * torch.finfo(start.dtype).eps * (fz.abs().nan_to_num(posinf=0.0) + 1)
        step = positive(size=size) * _perturbation(start)

        def changed(z: Tensor) -> Tensor:
            """Return samples whose phi is another one than at the start, (B,)."""
            new = packed(z)
            same = ((new - fz).abs() <= rounding) | (new == fz) | (new.isnan() & fz.isnan())
            return ~same.all(1)

        coupled = torch.zeros(len(fz), dtype=torch.bool, device=fz.device)
        if bool(changed(start).any()):
            return RowCheck(False, coupled)
        index = torch.arange(len(fz), device=fz.device)
        for bit in range(max(len(fz) - 1, 0).bit_length()):
            for value in (0, 1):  # each two samples differ in a bit
                moved = (index >> bit) & 1 == value
                coupled |= ~moved & changed(torch.where(moved[:, None], start + step, start))
    return RowCheck(True, coupled)


def _perturbation(z: Tensor) -> Tensor:
    """Return numbers of the size of z that depend on place, (B, D), the same at each call."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z)
    size = z.square().mean().sqrt() if z.numel() else z.sum()
    return numbers * torch.where(size > 0, size, 1.0).nan_to_num(nan=1.0, posinf=1.0)
