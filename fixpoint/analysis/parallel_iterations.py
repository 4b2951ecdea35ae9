"""Iterations of all time steps at once, by Jacobian, and their bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fixpoint.analysis.hidden_states import recurrent_layer, time_first
from fixpoint.models.rnn.base_cell import LeakyCell
from fixpoint.sequence import leaky_error_bound, solve_sequence


class ParallelIterations(NamedTuple):
    """Iterations until every window has converged, for the first T steps of the data.

    lengths: T, (S,).
    total: sum over these steps of |b_t|, which is that of |eta_t|, (S,).
    iterations: by Jacobian, (S,) each; `max_iter` where it was not enough.
    bound: the least i at which the bound of the leaky iteration is below rtol, (S,).
    """

    lengths: Tensor
    total: Tensor
    iterations: Mapping[str, Tensor]
    bound: Tensor


@torch.no_grad()
def parallel_iterations(
    layer: nn.Module,
    x: Tensor,
    lengths: Sequence[int],
    *,
    jacobians: Sequence[str] = ("leaky", "diagonal", "identity", "zero"),
    rtol: float = 1e-5,
    max_iter: int = 100,
) -> ParallelIterations:
    """Solve the first T steps of the data at once, for each T and Jacobian.

    Args:
        layer: an `ERNN`, `FastRNN` or `SpectralRNN`, or a model that holds one.
        x: windows in the layer's layout.
        lengths: values of T.
        jacobians: of "leaky", "zero", "identity", "diagonal" and "dense".

    Raises:
        TypeError: the layer is not a leaky recurrence.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import parallel_iterations
        >>> from fixpoint.models import ERNN
        >>> found = parallel_iterations(ERNN(9, 8), torch.randn(64, 2, 9), [16, 64])
        >>> bool((found.iterations["leaky"] <= found.bound).all())
        True
    """
    cell, x = getattr(recurrent_layer(layer), "l0", None), time_first(layer, x)
    if not isinstance(cell, LeakyCell):
        given = type(recurrent_layer(layer)).__name__
        raise TypeError(f"a leaky recurrence is needed (ERNN, FastRNN, SpectralRNN); got {given}")
    h0 = x.new_zeros(x.shape[1], cell.hidden_size)
    counts: dict[str, list[int]] = {name: [] for name in jacobians}
    totals, bounds = [], []
    for T in lengths:
        weights = cell.recurrence(T)
        K = max((v.shape[-1] for v in (weights.a, weights.b) if v.dim()), default=1)
        decay, b = (v.expand(T, K).reshape(-1).double() for v in (weights.a, weights.b))
        totals.append(b.abs().sum())
        gain = b.abs() * torch.linalg.matrix_norm(weights.A.double(), 2)
        bound = leaky_error_bound(decay, gain, max_iter).amax(1)
        bounds.append(int((bound > rtol).sum()))
        form = cell.parallel_form(x[:T], h0)
        for name in jacobians:
            solution = solve_sequence(
                form.step,
                form.x,
                h0,
                jacobian=name,
                decay=decay.to(x.dtype) if name == "leaky" else None,
                rtol=rtol,
                atol=rtol / 10,
                max_iter=max_iter,
                fallback=None,
            )
            done = bool(solution.converged.all())
            counts[name].append(int(solution.iterations.max()) if done else max_iter)
    return ParallelIterations(
        torch.tensor(list(lengths)),
        torch.stack(totals),
        {name: torch.tensor(values) for name, values in counts.items()},
        torch.tensor(bounds),
    )
