"""Verdict on the states of a layer, equilibria or not: the thresholds and the words, once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEAR, FAR = 0.01, 0.3
"""A gap up to which a state counts as equilibrated, and one from which it counts as integrating."""

_MOST = 100_000


def gap_quantiles(gap: Tensor) -> tuple[float, float, float] | None:
    """Compute the 10 %, 50 % and 90 % quantile of gaps; None where all are NaN.

    Of more than 100 000 gaps evenly spaced ones are taken.

    Example:
        >>> import torch
        >>> from fixpoint.analysis.gap_verdict import gap_quantiles
        >>> gap_quantiles(torch.linspace(0, 1, 11, dtype=torch.float64))
        (0.1, 0.5, 0.9)
    """
    good = gap[~gap.isnan()].double()
    if not len(good):
        return None
    some = good[:: max(1, len(good) // _MOST)]
    at = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=gap.device)
    low, middle, high = torch.quantile(some, at).tolist()
    return low, middle, high


def equilibrium_verdict(quantiles: Sequence[float], *, layers: int = 1) -> tuple[str, str]:
    """Say how far the states are from equilibrium in a sentence, and what it means in another.

    A layer equilibrates where 90 % of its states are within `NEAR`, and integrates where half of
    them are at least `FAR` away.

    Args:
        quantiles: see `gap_quantiles`.
        layers: number of layers that the verdict is about.

    Example:
        >>> from fixpoint.analysis.gap_verdict import equilibrium_verdict
        >>> equilibrium_verdict((0.0, 1e-4, 2e-3))[1]
        'This layer equilibrates: its states solve h = phi(h).'
    """
    low, middle, high = quantiles
    distance = (
        f"The median state is {middle:.2g} of its norm away from equilibrium "
        f"(10 % to 90 %: {low:.2g} to {high:.2g})."
    )
    one = layers == 1
    subject, s, its = ("This layer", "s", "its") if one else ("These layers", "", "their")
    if high <= NEAR:
        return distance, f"{subject} equilibrate{s}: {its} states solve h = phi(h)."
    if middle >= FAR:
        not_so = "it does not equilibrate" if one else "they do not equilibrate"
        return distance, f"{subject} integrate{s} {its} input over time, {not_so}."
    return distance, (
        f"{subject} equilibrate{s} in part: {its} states move towards h = phi(h) and stop short."
    )
