"""The inexact Newton method of the ERNN paper, with a learned step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fixpoint._validation import at_least
from fixpoint.solvers.base import IterativeSolver, LoopOptions, Norm, Solver, option_names


class InexactNewton(IterativeSolver):
    """z <- z + eta^(k) (phi(z) - z) with a step eta of its own for each update, learned.

    Newton's step s solves f'(z) s = -f(z), f(z) = phi(z) - z; here s = eta f(z), which leaves
    the error r = [I + eta f'(z)] f(z). Where ||I + eta f'(z)|| < 1 it converges linearly.
    eta has no sign constraint: a negative one breaks that condition wherever f' is negative.

    With `rtol = atol = 0`, the default, exactly `max_iter` updates are made. Few small steps
    (K = 1 or 2, eta near 0.01) do not reach an equilibrium: the state then integrates over time
    like a leaky RNN. Choose another solver where the equilibrium itself is needed.

    Args:
        max_iter: number of updates K.
        timesteps: T for steps eta of their own at each time index t, None to share them over
            time. A solve then has to say its `t`.
        eta: initial value, or one for each update, (K,); with `timesteps` also (T, K).
        learn: make eta a parameter; else it is a buffer. A learned eta needs `Unrolled`: at an
            exact equilibrium z does not depend on eta.
        rtol, atol, norm, leaf_atol, options: see `IterativeSolver`.

    Attributes:
        eta: (K,), or (T, K) with `timesteps`.

    Raises:
        ValueError: at a solve, t is missing or not in 0..T-1.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network,
        Eq. z and Theorem 1.

    Example:
        >>> import torch
        >>> from fixpoint import InexactNewton, solve
        >>> solver = InexactNewton(max_iter=2, eta=0.5, learn=False)
        >>> solve(lambda z: 0 * z + 1, torch.zeros(1, 1), solver).z
        tensor([[0.7500]])
    """

    eta: Tensor
    state_has_rows = False
    shared_options = ("eta", "learn", "timesteps", "first_eta")

    def __init__(
        self,
        max_iter: int = 1,
        *,
        timesteps: int | None = None,
        eta: float | Sequence[float] | Tensor = 0.01,
        learn: bool = True,
        rtol: float = 0.0,
        atol: float = 0.0,
        norm: Norm | None = None,
        leaf_atol: Sequence[float] | None = None,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(
            max_iter=max_iter, rtol=rtol, atol=atol, norm=norm, leaf_atol=leaf_atol, **options
        )
        self.timesteps = timesteps if timesteps is None else at_least(1, timesteps=timesteps)
        shape = (max_iter,) if timesteps is None else (timesteps, max_iter)
        self.first_eta = _initial(eta, shape)
        where = eta.device if isinstance(eta, Tensor) else None
        value = torch.empty_like(self.first_eta, device=where or torch.get_default_device())
        value.copy_(self.first_eta)
        if learn:
            self.eta = nn.Parameter(value)
        else:
            self.register_buffer("eta", value)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Put eta to its first values, as torch.nn's modules do, also after `to_empty`."""
        eta: Any = self.eta
        if hasattr(eta, "device_mesh"):  # FSDP has sharded it
            from torch.distributed.tensor import distribute_tensor

            first = self.first_eta.to(eta.device, eta.dtype)
            eta.copy_(distribute_tensor(first, eta.device_mesh, eta.placements))
        else:
            eta.copy_(self.first_eta)

    @property
    def learn(self) -> bool:
        """True if eta is a parameter."""
        return isinstance(self.eta, nn.Parameter)

    @property
    def learns_steps(self) -> bool:
        return self.learn

    def as_adjoint(self) -> Solver:
        """Return its steps averaged over time, where they are not the same."""
        if self.timesteps is None:
            return self
        names = [name for name in option_names(type(self)) if name not in self.shared_options]
        options = {name: getattr(self, name) for name in names}
        return type(self)(**options, eta=self.eta.detach().mean(0), learn=False)

    def with_options(self, **options: Any) -> InexactNewton:
        other, K = super().with_options(**options), self.eta.shape[-1]
        if other.max_iter > K:
            raise ValueError(
                f"eta has {K} steps but max_iter={other.max_iter} was given: build a new "
                "InexactNewton with more"
            )
        return other

    def init(self, z: Tensor, t: int | None) -> Tensor:
        """Return the steps at time t in the precision of z, (K,)."""
        return self.steps(t).to(z.dtype)

    def update(self, k: int, z: Tensor, fz: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.lerp(z, fz, state[k]), state

    def init_fixed(self, z: Tensor, fz: Tensor, t: int | None = None) -> Tensor:
        return self.init(z, t)

    def update_fixed(
        self, k: Tensor, z: Tensor, fz: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        k = k.clamp_max(len(state) - 1)  # a pass of several updates is cut at max_iter afterwards
        return torch.lerp(z, fz, state.index_select(0, k.view(1))), state

    def steps(self, t: int | None = None) -> Tensor:
        """Return eta of the updates at time t, (K,)."""
        if self.timesteps is None:
            eta = self.eta
        elif t is None:
            raise ValueError(
                f"eta has {self.timesteps} rows (timesteps={self.timesteps}), so the solve needs "
                "its time index: pass t, or build InexactNewton with timesteps=None to share eta "
                "over time"
            )
        elif not 0 <= t < self.timesteps:
            raise ValueError(
                f"eta has {self.timesteps} rows (timesteps={self.timesteps}) but t={t} was asked "
                f"for, time step number {t + 1}; build the layer or its InexactNewton with a "
                "larger timesteps, or timesteps=None to share eta over time"
            )
        else:
            eta = self.eta[t]
        return eta if eta.shape[0] == self.max_iter else eta[: self.max_iter]

    def steps_until(self, T: int, start: int = 0) -> Tensor:
        """Return eta of time steps start .. T - 1, (T - start, K), or (K,) where they share it.

        K is `max_iter`; `with_options` may have made it less than eta has.
        """
        if self.timesteps is None:
            eta = self.eta
        else:
            self.steps(T - 1)
            eta = self.eta[start:T]
        return eta if eta.shape[-1] == self.max_iter else eta[..., : self.max_iter]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, timesteps={self.timesteps}, learn={self.learn}"


def _initial(eta: float | Sequence[float] | Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return eta in the shape of the parameter, with values also within torch.device("meta")."""
    if isinstance(eta, float) and not math.isfinite(eta):
        raise ValueError(f"eta must be finite; got {eta}")
    try:
        where = eta.device if isinstance(eta, Tensor) else "cpu"
        value = torch.as_tensor(eta, dtype=torch.get_default_dtype(), device=where).detach()
        return value.expand(shape).clone()
    except (TypeError, ValueError, RuntimeError):
        needed = f"a number or one for each of the max_iter={shape[-1]} updates"
        given = tuple(eta.shape) if isinstance(eta, Tensor) else repr(eta)
        raise ValueError(f"eta must be {needed}, {shape}; got {given}") from None
