"""The equilibrated recurrent neural network, as a cell and as a layer like torch.nn.RNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.utils.rnn import PackedSequence

from fixpoint._messages import unknown_name
from fixpoint._torch import has_values
from fixpoint._validation import at_least
from fixpoint.backward import Backward, Implicit, Unrolled
from fixpoint.fixed_point import FixedPoint
from fixpoint.models._parameters import first_parameter
from fixpoint.models.maps import MAPS, EquilibriumMap, JordanMap
from fixpoint.models.ops.common.plan import CallPlan, make_plan
from fixpoint.models.rnn.base_cell import Leaky, LeakyCell, RecurrentCell, not_fused
from fixpoint.models.rnn.base_layer import Recurrent, StreamState
from fixpoint.models.rnn.equilibrium import (
    fused_trajectory,
    is_manifold,
    method_of,
    why_not_fused,
)
from fixpoint.models.rnn.parallel import ParallelForm
from fixpoint.models.rnn.scan import Trajectory, check_compatible, mask_nonfinite, scan
from fixpoint.sequence import LeakyJacobian
from fixpoint.sequence.jacobians import MAX_DENSE
from fixpoint.solvers import InexactNewton, IterativeSolver, Picard, Solver, make_solver

M = TypeVar("M", bound=nn.Module)


class ERNNCell(LeakyCell):
    r"""One time step of an ERNN: h_t solves h = phi(h, h_{t-1}, x_t), started at h_{t-1}.

    By default the paper's benchmark model: the Jordan map with K = `max_iter` steps of
    `InexactNewton`,

        h^(k) = h^(k-1) + eta_t^(k) [sigma((I + U)(V h^(k-1) + W x_t + b)) - h^(k-1)].

    With so few small steps the state is far from equilibrium; see `JordanMap`. A fused path
    applies to this solver, unrolled whole, with the Jordan map, or with any map for K = 1; and
    to the self-feedback, identity-feedback and linear maps, where numba is installed: solved to a
    tolerance by `Picard`, `InexactNewton`, `Anderson` or `Broyden` with `Implicit`, and in any
    updates of `Picard` or `InexactNewton` with `Unrolled()`. Under torch.no_grad, solves by these
    to a tolerance are fused with any backward.

    Args:
        input_size: features d of x_t.
        hidden_size: units n of h_t.
        nonlinearity: sigma: relu, tanh, sigmoid or identity. None takes the map's own: relu for
            "jordan", tanh for the self-feedback maps.
        bias: have b.
        map: "jordan", "self-feedback", "identity-feedback", "linear", or an `EquilibriumMap`, which
            then brings its own nonlinearity, bias and rank.
        max_iter: K, where no solver is given.
        timesteps: T for an eta of its own at each time step, as in the paper; None shares eta
            over time. Longer sequences are refused.
        rank: rank of U, Jordan map only; None for a full U, 0 for none.
        solver: a solver or its name; `InexactNewton(max_iter, timesteps=timesteps)` if not given.
        backward: `Unrolled()` if not given.
        implementation, time, device, dtype: see `RecurrentCell`.
        recompute: see `LeakyCell`.

    Attributes:
        map: phi, an `EquilibriumMap`.
        fixed_point: the solver and the backward.

    Inputs: x, hx, t
        x: (B, d) or (d,). hx: (B, n) or (n,), zeros if not given.
        t: time index, needed with `timesteps`.

    Raises:
        ValueError: an unknown value or an invalid combination, when built; a wrong shape or t,
            when called.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network.

    Example:
        >>> import torch
        >>> from fixpoint.models import ERNNCell
        >>> ERNNCell(9, 80, rank=8)(torch.randn(4, 9)).shape
        torch.Size([4, 80])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        nonlinearity: str | None = None,
        bias: bool = True,
        map: str | EquilibriumMap = "jordan",
        max_iter: int = 1,
        timesteps: int | None = None,
        rank: int | None = None,
        solver: str | Solver | None = None,
        backward: Backward | None = None,
        implementation: str = "auto",
        recompute: bool = False,
        time: str = "sequential",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        where: Any = {"device": device, "dtype": dtype}
        if isinstance(map, EquilibriumMap):
            phi = _own_map(map, input_size, hidden_size, nonlinearity, rank)
            phi = _placed(phi, where)
        else:
            phi = _make_map(map, input_size, hidden_size, nonlinearity, bias, rank, where)
        if solver is None:
            solver = InexactNewton(max_iter, timesteps=timesteps)
        elif max_iter != 1 or timesteps is not None:
            raise ValueError(
                "max_iter and timesteps configure the default solver, but a solver was given: set "
                "them on the solver"
            )
        # States have the units of the activation: a default atol does not follow their scale.
        fixed_point = FixedPoint(make_solver(solver).absolute(), backward or Unrolled())
        check_compatible(phi, fixed_point)
        super().__init__(
            input_size,
            hidden_size,
            nonlinearity=phi.nonlinearity,
            implementation=implementation,
            recompute=recompute,
            time=time,
            **where,
        )
        self.map: EquilibriumMap = phi
        self.fixed_point: FixedPoint = _placed(fixed_point, where)
        self._planned: tuple[object, object, object] = (None, None, None)
        reason = self._why_not_leaky() if recompute else self.no_fused_path()
        if (recompute or implementation == "fused") and reason:
            raise ValueError(not_fused(reason))
        if time == "parallel" and (reason := self.no_parallel_path()):
            raise ValueError(f'time="parallel" does not apply: {reason}; use "sequential"')

    def no_parallel_path(self) -> str | None:
        solver, backward = self.fixed_point.solver, self.fixed_point.backward
        if solver.has_tolerance:
            if isinstance(solver, IterativeSolver) and isinstance(backward, Implicit):
                return None
            return f"a solve to a tolerance needs Implicit(), not {backward!r}"
        if not isinstance(solver, InexactNewton) or solver.max_iter < 1:
            return f"a fixed number of steps is that of InexactNewton, not {type(solver).__name__}"
        if isinstance(backward, Unrolled) and (backward.last or solver.max_iter) >= solver.max_iter:
            return None
        return f"its backward is Unrolled() through all steps, not {backward!r}"

    def parallel_form(self, x: Tensor, h0: Tensor, start: int = 0) -> ParallelForm:
        if self._why_not_leaky() is None:
            return super().parallel_form(x, h0, start)
        solver = self.fixed_point.solver
        if isinstance(solver, InexactNewton) and not solver.has_tolerance:
            return self._inner_steps_form(x, solver.steps_until(start + len(x), start))
        # Jacobians of many units cost more than they save where phi contracts.
        jacobian = "dense" if self.hidden_size <= MAX_DENSE else "zero"
        assert isinstance(solver, IterativeSolver)
        return ParallelForm(self.map, x, jacobian, solver=solver)

    def _inner_steps_form(self, x: Tensor, eta: Tensor) -> ParallelForm:
        """Return K inexact Newton steps as one step: phi depends on h_{t-1} and on its iterate."""
        K, phi = eta.shape[-1], self.map
        eta = eta.expand(len(x), K)

        def step(past: Tensor, inputs: tuple[Tensor, Tensor]) -> Tensor:
            x, eta = inputs
            h = past
            for k in range(K):
                h = h + eta[:, k : k + 1] * (phi(h, past, x) - h)
            return h

        steps = eta.unsqueeze(1).expand(-1, x.shape[1], -1)
        return ParallelForm(step, (x, steps), LeakyJacobian((1 - eta).prod(1)))

    def reset_parameters(self) -> None:
        """Draw all parameters again, and put the steps of the solver to their first values."""
        super().reset_parameters()
        reset = getattr(self.fixed_point.solver, "reset_parameters", None)
        if reset is not None:
            reset()

    @property
    def timesteps(self) -> int | None:  # type: ignore[override]
        """T where the solver has steps of their own at each time index."""
        return getattr(self.fixed_point.solver, "timesteps", None)

    def plan(self, device: torch.device | None = None) -> CallPlan:
        if torch.compiler.is_compiling():
            return self.make_plan(first_parameter(self).device if device is None else device)
        fixed_point, (phi, solver, backward) = self.fixed_point, self._planned
        same = phi is self.map and solver is fixed_point.solver and backward is fixed_point.backward
        if not same:  # another one was set
            self._plans = {}
            self._planned = self.map, fixed_point.solver, fixed_point.backward
        return super().plan(device)

    def make_plan(self, device: torch.device) -> CallPlan:
        leaky, equilibrium = self._why_not_leaky(), self._why_not_equilibrium()
        if leaky is None:
            return make_plan("leaky", None, self.hidden_size, device)
        if equilibrium is not None:
            reason = f"{leaky}; as an equilibrium, {equilibrium}"
            return make_plan("", reason, self.hidden_size, device)
        path = "manifold" if is_manifold(self.map) else "equilibrium"
        plan = make_plan(path, None, self.hidden_size, device)
        method = method_of(self.map, self.fixed_point, device)
        return plan._replace(method=method) if plan.fused else plan

    def _why_not_leaky(self) -> str | None:
        return _why_not_leaky(self.map, self.fixed_point)

    def _why_not_equilibrium(self) -> str | None:
        return why_not_fused(self.map, self.fixed_point)

    def recurrence(self, T: int, start: int = 0) -> Leaky:
        solver = self.fixed_point.solver
        weights: Any = self.map(read=lambda phi: phi.as_leaky_step())
        if not isinstance(solver, InexactNewton) or weights is None:
            raise ValueError(f"the layer is not a leaky recurrence: {self.no_fused_path()}")
        eta = solver.steps_until(start + T, start)
        A, W, b = weights
        return Leaky(A, W, b, 1 - eta, eta)

    def _fused(
        self,
        plan: CallPlan,
        x: Tensor,
        h0: Tensor,
        last_only: bool,
        start: int,
        lower: torch.dtype | None = None,
    ) -> tuple[str | None, Tensor | None]:
        if plan.method is None:
            return super()._fused(plan, x, h0, last_only, start, lower)
        reason, path = fused_trajectory(plan, self.map, self.fixed_point, x, h0, start)
        if path is None:
            return reason, None
        return None, path.h_n if last_only else path.output

    def trajectory(self, x: Tensor, h0: Tensor | None = None, *, start: int = 0) -> Trajectory:
        """Return all states of x, (T, B, d), and how each was solved; see `scan`."""
        plan = self.plan(x.device)
        if self.implementation != "reference" and plan.method is not None:
            h = x.new_zeros(x.shape[1], self.hidden_size) if h0 is None else h0
            finite, h, good = mask_nonfinite(x, h)
            path = fused_trajectory(plan, self.map, self.fixed_point, finite, h, start, good)[1]
            if path is not None:
                return path
        return scan(self.map, self.fixed_point, x, h0, start=start)

    def plain_states(self, x: Tensor, h0: Tensor, *, last_only: bool, start: int = 0) -> Tensor:
        fixed_point = self.fixed_point
        if fixed_point.solver.has_tolerance and not has_values(x):
            # When a solve ends depends on values: one update has its shapes and its graph.
            fixed_point = FixedPoint(Picard(max_iter=1, rtol=0.0, atol=0.0), Unrolled())
        path = scan(self.map, fixed_point, x, h0, start=start)
        return path.h_n if last_only else path.output

    def single_step(self, x: Tensor, h: Tensor, t: int | None) -> Tensor:
        plan, solver = self.plan(x.device), self.fixed_point.solver
        if plan.path != "leaky" or not isinstance(solver, InexactNewton):
            if isinstance(solver, InexactNewton):
                solver.steps(t)  # which says that it needs its time index
            return RecurrentCell.single_step(self, x, h, t)
        past, phi, eta = h, self.map, solver.steps(t)
        for step in (eta,) if solver.max_iter == 1 else eta.unbind():
            h = torch.lerp(h, phi(h, past, x), step)
        return h


class ERNN(Recurrent):
    """Equilibrated recurrent layers, called like `torch.nn.RNN`.

    Arguments: see `Recurrent`, and `ERNNCell` for those of the cell.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network.

    Example:
        >>> import torch
        >>> from fixpoint.models import ERNN
        >>> layer = ERNN(9, 80, rank=8, timesteps=128, batch_first=True)
        >>> output, h_n = layer(torch.randn(4, 128, 9))
        >>> output.shape, h_n.shape
        (torch.Size([4, 128, 80]), torch.Size([1, 4, 80]))
    """

    cell_class = ERNNCell

    @property
    def map(self) -> EquilibriumMap:
        """phi of the first layer."""
        return self._first.map

    @property
    def fixed_point(self) -> FixedPoint:
        """The solver and the backward of the first layer."""
        return self._first.fixed_point

    @property
    def _first(self) -> ERNNCell:
        return cast(ERNNCell, self.l0)

    def trajectory(self, x: Tensor, hx: Tensor | StreamState | None = None) -> Trajectory:
        """Return the outputs in the layout of `forward` together with how each step was solved.

        Raises:
            ValueError: the layer has several layers or directions.
            TypeError: x is packed.
        """
        if self.num_layers > 1 or self.bidirectional:
            raise ValueError(
                "trajectory follows one layer in one direction: call it on an ERNN with "
                "num_layers=1 and bidirectional=False"
            )
        if isinstance(x, PackedSequence):
            raise TypeError("trajectory takes a tensor; unpack x by pad_packed_sequence")
        given, first = (None, 0) if hx is None else self._start_of(hx)
        time_first, states = self._time_first(x, given, batch_first=self.batch_first)
        h0 = None if states is None else states[0][0]
        path = self._first.trajectory(time_first, h0, start=first)
        if x.dim() == 2:
            return path._replace(output=path.output.squeeze(1))
        output = path.output.transpose(0, 1) if self.batch_first else path.output
        return path._replace(output=output, h_n=path.h_n.unsqueeze(0))

    def grow_steps(self, timesteps: int) -> None:
        """Give eta this many time steps: new ones have the value of the last, further ones go.

        eta is a new parameter afterwards: make the optimizer after it.

        Raises:
            ValueError: the layer has no steps of their own at each time index.
        """
        at_least(1, timesteps=timesteps)

        def grow(eta: Tensor) -> Tensor:
            return eta[torch.arange(timesteps, device=eta.device).clamp(max=len(eta) - 1)]

        self._set_steps(timesteps, grow)

    def resample_steps(self, timesteps: int) -> None:
        """Give eta this many time steps, its course stretched over them by linear interpolation.

        For sequences sampled at another rate. eta is a new parameter afterwards: make the optimizer
        after it.

        Raises:
            ValueError: the layer has no steps of their own at each time index.
        """
        at_least(1, timesteps=timesteps)

        def resample(eta: Tensor) -> Tensor:
            course = eta.t().unsqueeze(0)
            return interpolate(course, timesteps, mode="linear", align_corners=True)[0].t()

        self._set_steps(timesteps, resample)

    @torch.no_grad()
    def _set_steps(self, timesteps: int, change: Callable[[Tensor], Tensor]) -> None:
        for cell in self.cells():
            solver = cell.fixed_point.solver
            if not isinstance(solver, InexactNewton) or solver.timesteps is None:
                raise ValueError(
                    "the layer has no steps of their own at each time index: build it with "
                    "timesteps=..., or leave the length of its sequences free as it is"
                )
            solver.first_eta = change(solver.first_eta).contiguous()
            eta = change(solver.eta).clone(memory_format=torch.contiguous_format)
            if solver.learn:
                solver.eta = nn.Parameter(eta, requires_grad=solver.eta.requires_grad)
            else:
                solver.eta = eta
            solver.timesteps = timesteps


def _placed(module: M, where: dict[str, Any]) -> M:
    return module if where == {"device": None, "dtype": None} else module.to(**where)


def _why_not_leaky(phi: EquilibriumMap, fixed_point: FixedPoint) -> str | None:
    solver, backward = fixed_point.solver, fixed_point.backward
    if type(solver) is not InexactNewton or solver.has_tolerance:
        end = " with a tolerance" if isinstance(solver, InexactNewton) else ""
        return f"it makes a fixed number of InexactNewton steps, not {type(solver).__name__}{end}"
    K = solver.max_iter
    if K < 1:
        return "it makes at least one step, and max_iter is 0"
    if not isinstance(backward, Unrolled) or (backward.last or K) < K:
        return f"its backward is Unrolled() through all steps, not {backward!r}"
    if not phi.defines("as_leaky_step") or (K > 1 and phi.uses_previous_state):
        return f"{type(phi).__name__} is not known to be sigma(A h + u_t) for max_iter={K}"
    return None


def _make_map(
    name: str,
    input_size: int,
    hidden_size: int,
    nonlinearity: str | None,
    bias: bool,
    rank: int | None,
    where: Any,
) -> EquilibriumMap:
    if isinstance(name, type) and issubclass(name, EquilibriumMap):
        raise TypeError(
            f"map is the class {name.__name__}: give a ready one, "
            f"{name.__name__}({input_size}, {hidden_size})"
        )
    if name not in MAPS:
        raise ValueError(unknown_name("map", name, MAPS))
    options: Any = {"nonlinearity": nonlinearity, "bias": bias, **where}
    if rank is None:
        return MAPS[name](input_size, hidden_size, **options)
    if name != "jordan":
        raise ValueError(f"the {name} map has no rank; leave it out")
    return JordanMap(input_size, hidden_size, rank=rank, **options)


def _own_map(
    phi: EquilibriumMap,
    input_size: int,
    hidden_size: int,
    nonlinearity: str | None,
    rank: int | None,
) -> EquilibriumMap:
    if (phi.input_size, phi.hidden_size) != (input_size, hidden_size):
        raise ValueError(
            f"the map has sizes {phi.input_size} and {phi.hidden_size}, the layer {input_size} "
            f"and {hidden_size}: build both alike"
        )
    if nonlinearity is not None or rank is not None:
        raise ValueError("nonlinearity and rank configure a named map: set them on the given map")
    return phi
