"""The error of the leaky iteration after i iterations, before it is run."""

from __future__ import annotations

import torch
from torch import Tensor


def leaky_error_bound(decay: Tensor, gain: Tensor, iterations: int) -> Tensor:
    """Return bounds of |e_t^(i)| / max_s |e_s^(0)| for i = 0 .. `iterations`, (iterations + 1, T).

    For h_t = decay_t h_{t-1} + b_t sigma(A h_{t-1} + u_t) and gain_t = |b_t| L with
    L = max ||D A||_2, D the diagonal of sigma', at most ||A||_2 where |sigma'| <= 1:

        E_t^(i) = |decay_t| E_{t-1}^(i) + gain_t E_{t-1}^(i-1),  E_0^(i) = 0.

    With decay = 1 - eta, gain = eta L and 0 <= eta <= 1 that is L^i P(N_t >= i), N_t the number of
    successes in t - 1 trials of probabilities eta_2 .. eta_t (h_0 has no error): iterations depend
    on the sum of eta and on L, not on T.

    Args:
        decay, gain: (T,).

    Example:
        >>> import torch
        >>> from fixpoint.sequence import leaky_error_bound
        >>> leaky_error_bound(torch.full((3,), 0.5), torch.full((3,), 0.5), 3)[:, -1]
        tensor([1.0000, 0.7500, 0.2500, 0.0000])
    """
    bound = torch.ones(iterations + 1, len(decay), dtype=decay.dtype, device=decay.device)
    for i in range(1, iterations + 1):
        before = torch.cat([bound.new_zeros(1), bound[i - 1, :-1]])
        offset = gain * before
        state = bound.new_zeros(())
        for t in range(len(decay)):
            state = decay[t].abs() * state + offset[t]
            bound[i, t] = state
    return bound
