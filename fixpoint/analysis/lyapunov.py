"""Largest Lyapunov exponent of a recurrence along real data: it forgets or amplifies."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from fixpoint.analysis.hidden_states import recurrent_layer, time_first
from fixpoint.models import RecurrentCell
from fixpoint.models.rnn.base_layer import Recurrent
from fixpoint.sequence.recurrence import SequenceProblem
from fixpoint.sequence.sequential import advance_tangent


class LyapunovExponent(NamedTuple):
    """Growth of a small change of the state over T time steps of B windows.

    growth: log |e_t| / |e_0| of a tangent e, (T, B), natural logarithm.
    exponent: its mean rate over the second half of the steps, (B,), per time step.
    """

    growth: Tensor
    exponent: Tensor

    @property
    def sentence(self) -> str:
        """A sentence on the exponent and time="parallel"."""
        mean, worst = self.exponent.mean().item(), self.exponent.max().item()
        measured = (
            f"The largest Lyapunov exponent along these windows is {mean:.3g} per time step "
            f"(largest {worst:.3g})"
        )
        if mean > 0:
            return (
                f'{measured}: changes of the state grow, so time="parallel" takes the sequential '
                "path over sequences this long; short windows of time may still be solved at once."
            )
        if worst > 0:
            return (
                f"{measured}: changes of the state grow along some windows, which "
                'time="parallel" may have to solve step by step.'
            )
        steps = f"{-1 / mean:.3g}" if mean < 0 else "ever more"
        return (
            f'{measured}: the state forgets within {steps} steps, so time="parallel" can solve '
            "all steps at once, which is faster on some devices only."
        )


@torch.no_grad()
def lyapunov_exponent(layer: nn.Module, x: Tensor, *, seed: int = 0) -> LyapunovExponent:
    """Measure the largest Lyapunov exponent of a recurrent layer along data, by its tangents.

    A random unit tangent is carried through the Jacobians of the steps and rescaled at each.
    Below 0 the recurrence forgets its state, and all steps can be solved at once; above 0 small
    changes grow until rounding alone changes the states, and no iteration over all steps can
    work. Over T steps it is a finite-time exponent.

    Args:
        layer: an `ERNN`, `FastRNN`, ... with one layer and direction, or a model that holds one as
            its attribute `layer`.
        x: windows in the layer's layout, (T, B, d) or (B, T, d).
        seed: of the tangent.

    Raises:
        TypeError: the layer is not one of `fixpoint.models`.
        ValueError: it has several layers or directions.

    Source: Benettin et al. (1980), Lyapunov characteristic exponents; Gonzalez et al. (2025),
        Predictability enables parallelization of nonlinear state space models.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import lyapunov_exponent
        >>> from fixpoint.models import FastRNN
        >>> bool((lyapunov_exponent(FastRNN(9, 8), torch.randn(50, 4, 9)).exponent < 0).all())
        True
    """
    inner, x = recurrent_layer(layer), time_first(layer, x)
    if not isinstance(inner, Recurrent):
        raise TypeError(
            f"lyapunov_exponent follows the layers of fixpoint.models; got {type(inner).__name__}"
        )
    if inner.num_layers > 1 or inner.bidirectional:
        raise ValueError("several layers or directions have no one state: take one of them alone")
    cell, h0 = cast(RecurrentCell, inner.l0), x.new_zeros(x.shape[1], inner.hidden_size)
    form = cell.parallel_form(x, h0)
    recurrence = SequenceProblem(form.step, form.x, h0, form.solver is not None)
    states = cell.states(x, h0, last_only=False) if form.inner == 1 else None
    e = torch.randn(h0.shape, generator=torch.Generator().manual_seed(seed)).to(h0)
    e, growth, h = e / e.norm(dim=1, keepdim=True), [], h0
    for t, step in enumerate(recurrence.steps()):
        after = step(h, h) if states is None else states[t]
        e = advance_tangent(step, after, h, e, joint=recurrence.joint)
        size = e.norm(dim=1, keepdim=True).clamp_min(torch.finfo(e.dtype).tiny)
        e, h = e / size, after
        growth.append(size.squeeze(1).double().log())
    total = torch.stack(growth).cumsum(0)[form.inner - 1 :: form.inner]
    half = len(total) // 2
    before = total[half - 1] if half else torch.zeros_like(total[0])
    return LyapunovExponent(total, (total[-1] - before) / (len(total) - half))
