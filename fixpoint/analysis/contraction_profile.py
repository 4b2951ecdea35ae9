"""Convergence condition of an ERNN over the time steps of a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fixpoint.analysis.contraction import contraction, feasible_eta
from fixpoint.analysis.evenly_spaced import evenly_spaced
from fixpoint.analysis.hidden_states import recurrent_layer
from fixpoint.models import ERNN, EquilibriumMap
from fixpoint.solvers import InexactNewton, Picard


class ContractionProfile(NamedTuple):
    """The convergence condition at S time steps, K updates and B windows.

    t: time indices, (S,).
    eta: the step of each update, (S, K).
    norm: ||I + eta f'(z)||_2 at the state z from which the update starts, (S, K, B).
    lower, upper: the feasible interval of eta there, (S, K, B); NaN where it is empty.
    """

    t: Tensor
    eta: Tensor
    norm: Tensor
    lower: Tensor
    upper: Tensor

    @property
    def fraction_holding(self) -> float:
        """Fraction of the (t, k, window) at which the condition holds."""
        return (self.norm < 1).double().mean().item()


@torch.no_grad()
def contraction_profile(model: nn.Module, x: Tensor, *, points: int = 16) -> ContractionProfile:
    """Return the convergence condition along a sequence, at `points` time steps spread evenly.

    For `InexactNewton` (and a Picard iteration with a fixed number of steps) each of the K
    updates is evaluated from the state that it starts from, with its own eta. For a solver that
    runs to a tolerance the state is the solution h_t and eta = 1, the condition of plain
    iteration.

    Args:
        model: an `ERNN`, or a model that holds one as `layer`.
        x: windows in the layer's layout, (T, B, d) or (B, T, d).
        points: most time steps to look at.

    Raises:
        TypeError: the model holds no `ERNN`.
        ValueError: the layer's solver makes no updates.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network,
        Theorem 1 at every time step.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import contraction_profile
        >>> from fixpoint.models import ERNN
        >>> profile = contraction_profile(ERNN(9, 8), torch.randn(20, 4, 9), points=3)
        >>> profile.t, profile.norm.shape
        (tensor([ 0, 10, 19]), torch.Size([3, 1, 4]))
    """
    layer = ernn_of(model, "contraction_profile")
    if layer.fixed_point.solver.max_iter == 0:
        raise ValueError(
            "the layer's solver makes no updates (max_iter=0), so there is no condition to look "
            "at: build it with max_iter >= 1"
        )
    time_first = x.transpose(0, 1) if layer.batch_first else x
    T = len(time_first)
    output = layer.trajectory(x).output
    output = output.transpose(0, 1) if layer.batch_first else output
    at = layer.map.bind(time_first)
    times = evenly_spaced(T, points)
    rows = []
    for t in times.tolist():
        past = output[t - 1] if t else torch.zeros_like(output[0])
        phi = at(t, past)
        steps, z = _steps(layer, t).to(past.device), past
        if layer.fixed_point.solver.has_tolerance:
            steps, z = torch.ones(1, device=past.device), output[t]
        row = []
        for eta in steps:
            interval = feasible_eta(phi, z)
            row.append((eta, contraction(phi, z, eta), interval.lower, interval.upper))
            z = torch.lerp(z, phi(z), eta.to(z.dtype))
        rows.append([torch.stack(parts) for parts in zip(*row, strict=True)])
    eta, norm, lower, upper = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return ContractionProfile(times, eta, norm, lower, upper)


def ernn_of(model: nn.Module, function: str) -> ERNN:
    """Return the ERNN that a model is or holds as its attribute `layer`.

    Raises:
        TypeError: there is none; `function` is named.
    """
    layer = recurrent_layer(model)
    if not isinstance(layer, ERNN):
        raise TypeError(
            f"{function} is for an ERNN; got {type(layer).__name__}: pass an ERNN, or a model that "
            "holds one as its attribute `layer`"
        )
    return layer


def learned_eta(layer: ERNN) -> Tensor:
    """Compute eta of every time step and update, (T, K); (1, K) where it is shared over time.

    Raises:
        TypeError: the layer's solver has no eta.

    Source: Zhang et al. (2019), figure eta.

    Example:
        >>> from fixpoint.analysis import learned_eta
        >>> from fixpoint.models import ERNN
        >>> learned_eta(ERNN(9, 8, max_iter=2, timesteps=20)).shape
        torch.Size([20, 2])
    """
    solver = layer.fixed_point.solver
    if not isinstance(solver, InexactNewton):
        raise TypeError(f"{type(solver).__name__} has no eta: build the layer with InexactNewton")
    eta = solver.steps_until(solver.timesteps or 1)
    return torch.atleast_2d(eta.detach().clone())


def least_squares_line(eta: Tensor) -> Tensor:
    """Return slope and intercept of the line through eta_t over t = 1 .. T, (K, 2) in float64.

    Args:
        eta: (T, K) with T >= 2.

    Raises:
        ValueError: fewer than two time steps.

    Source: the red lines of Zhang et al. (2019), figure eta.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import least_squares_line
        >>> least_squares_line(torch.tensor([[1.0], [1.5], [2.0]])).round(decimals=6)
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    if len(eta) < 2:
        raise ValueError(f"a line needs two time steps; got {len(eta)}: build with timesteps=T")
    t = torch.arange(1, len(eta) + 1, dtype=torch.float64, device=eta.device)
    values, centered = eta.detach().double(), t - t.mean()
    slope = centered @ values / centered.square().sum()
    return torch.stack([slope, values.mean(0) - slope * t.mean()], 1)


def _steps(layer: ERNN, t: int) -> Tensor:
    """Compute eta of each update at time t, (K,)."""
    solver = layer.fixed_point.solver
    if isinstance(solver, InexactNewton):
        return solver.steps(t).detach()
    beta = solver.beta if isinstance(solver, Picard) else 1.0
    return torch.full((solver.max_iter,), beta)


@torch.no_grad()
def equilibrium_gap(phi: EquilibriumMap, x: Tensor, output: Tensor) -> Tensor:
    """Measure the distance of each state from its equilibrium, (T, B).

    It is |phi(h_t) - h_t| over the larger of |phi(h_t)| and |h_t|.

    Near 0 the state is equilibrated; near 1 it is not: the layer integrates its input over time.

    Args:
        phi: the map that made `output`, started at h_0 = 0.
        x: (T, B, d).
        output: h_1 .. h_T, (T, B, n).

    Example:
        >>> import torch
        >>> from fixpoint.analysis import equilibrium_gap
        >>> from fixpoint.models import ERNN
        >>> layer, x = ERNN(9, 8), torch.randn(20, 4, 9)
        >>> bool((equilibrium_gap(layer.map, x, layer(x)[0]) > 0.5).any())  # eta = 0.01
        True
    """
    at = phi.bind(x)
    past = torch.cat([torch.zeros_like(output[:1]), output[:-1]])
    target = torch.stack([at(t, past[t])(output[t]) for t in range(len(x))])
    tiny = torch.finfo(output.dtype).tiny
    size = torch.maximum(target.norm(dim=2), output.norm(dim=2))
    return (target - output).norm(dim=2) / size.clamp_min(tiny)
