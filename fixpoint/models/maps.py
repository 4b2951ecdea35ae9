"""The maps phi(h, h_prev, x) whose equilibrium is the hidden state h_t of an ERNN."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixpoint._messages import unknown_name
from fixpoint._validation import at_least, boolean, positive
from fixpoint.models._parameters import Resettable, small_normal_
from fixpoint.models._signature import OptionsMixin
from fixpoint.models.deq.spectral_norm import bound_spectral_norm
from fixpoint.models.ops.common.activations import ACTIVATIONS

if TYPE_CHECKING:
    from typing_extensions import Unpack

Phi = Callable[[Tensor], Tensor]


class SelfFeedback(NamedTuple):
    """sigma(U h + V h_prev + W x + b): U, V (n, n), W (n, d), b (n,); U = None is the identity."""

    U: Tensor | None
    V: Tensor
    W: Tensor
    b: Tensor | None


class MapOptions(TypedDict, total=False):
    """Options of every `EquilibriumMap`."""

    nonlinearity: str | None
    bias: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class EquilibriumMap(OptionsMixin, Resettable):
    """A map phi(h, h_prev, x), bound to a whole sequence at a time by `bind`.

    Weights are named as in the paper and drawn from N(0, 0.1^2), the bias b is 0. A new map
    implements `bind` alone; `forward` is phi as the paper writes it.

    Args:
        input_size: features d of x_t.
        hidden_size: units n of h_t.
        nonlinearity: sigma, a name in `ACTIVATIONS`; None takes `default_nonlinearity`.
        bias: have b.
        device, dtype: of the parameters.

    Raises:
        ValueError: the nonlinearity is unknown, or a size is below 1.

    Source: Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent Neural Network.

    Example:
        >>> import torch
        >>> from fixpoint.models import EquilibriumMap
        >>> class Damped(EquilibriumMap):
        ...     def bind(self, x):  # phi = tanh(0.5 h + V h_prev + W x + b)
        ...         u = self.input_projection(x).unbind(0)
        ...         return lambda t, past: lambda h: torch.tanh(0.5 * h + past @ self.V.mT + u[t])
        >>> phi = Damped(3, 8)
        >>> phi(torch.zeros(2, 8), torch.zeros(2, 8), torch.randn(2, 3)).shape
        torch.Size([2, 8])
    """

    uses_previous_state: ClassVar[bool] = True
    """Whether phi depends on h_{t-1}; else h_{t-1} is only the start of the iteration."""
    default_nonlinearity: ClassVar[str] = "tanh"
    has_V: ClassVar[bool] = True
    """Whether there is a matrix V of h_{t-1}."""
    V: Tensor
    W: Tensor
    b: Tensor | None
    U: Tensor
    U1: Tensor
    U2: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        nonlinearity: str | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        self.input_size = at_least(1, input_size=input_size)
        self.hidden_size = at_least(1, hidden_size=hidden_size)
        nonlinearity = self.default_nonlinearity if nonlinearity is None else nonlinearity
        if nonlinearity not in ACTIVATIONS:
            raise ValueError(unknown_name("nonlinearity", nonlinearity, ACTIVATIONS))
        self.nonlinearity = nonlinearity
        if self.has_V:
            self.new_parameter("V", hidden_size, hidden_size, start=small_normal_)
        self.new_parameter("W", hidden_size, input_size, start=small_normal_)
        if boolean(bias=bias):
            self.new_parameter("b", hidden_size, start=nn.init.zeros_)
        else:
            self.register_parameter("b", None)

    def bind(self, x: Tensor) -> Callable[[int, Tensor], Phi]:
        """Return `at(t, h_prev)` giving phi of h, (B, n), for a sequence x, (T, B, d).

        What does not depend on h is computed once: the inputs of all time steps in one product,
        V h_prev once a step. Time is split by `unbind`: indexing would make each step's backward
        fill a gradient of the whole sequence.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no bind(x): define it, and return a function at(t, h_prev) "
            "that returns phi"
        )

    def as_leaky_step(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Return a (n, n), W' (n, d), b' (n,) with phi(h, h, x) = sigma(A h + W' x + b').

        That is phi where h_prev = h: all that a single step needs, and where
        phi does not depend on h_prev any number of them. None where a map has no such form.
        """
        return None

    def as_self_feedback(self) -> SelfFeedback | None:
        """Return the weights of phi = sigma(U h + V h_prev + W x + b), None where phi has another
        form.
        """
        return None

    def defines(self, form: str) -> bool:
        """Tell whether `form`, a method as "as_leaky_step", describes this class's own phi.

        A subclass with a new phi and the form of its parent is another map.
        """
        kind: Any = type(self)
        known = _defines.__wrapped__ if torch.compiler.is_compiling() else _defines
        return known(kind, form)

    def forward(
        self,
        h: Tensor | None = None,
        h_prev: Tensor | None = None,
        x: Tensor | None = None,
        *,
        read: Callable[[EquilibriumMap], Any] | None = None,
    ) -> Any:
        """Return phi(h, h_prev, x) with h, h_prev (B, n) and x (B, d).

        A layer calls it once a sequence with `read`, a function of the map that takes its weights
        or binds it, and gets the result: so the map's hooks run, those of pruning among them.
        """
        if read is not None:
            return read(self)
        if h is None or h_prev is None or x is None:
            raise TypeError("phi takes h, h_prev and x")
        if self.defines("single_step"):
            return self.single_step(h, h_prev, x)
        return self.bind(x.unsqueeze(0))(0, h_prev)(h)

    def single_step(self, h: Tensor, h_prev: Tensor, x: Tensor) -> Tensor:
        """Return phi(h, h_prev, x), where it is cheaper for one time step than by way of `bind`."""
        raise NotImplementedError

    def input_projection(self, x: Tensor) -> Tensor:
        """Return W x + b for every time step, (T, B, n)."""
        return F.linear(x, self.W, self.b)

    def extra_repr(self) -> str:
        bias = "" if self.b is not None else ", bias=False"
        return f"{self.input_size}, {self.hidden_size}, nonlinearity={self.nonlinearity!r}{bias}"


@functools.cache
def _defines(kind: type, form: str) -> bool:
    """Tell for `EquilibriumMap.defines` what a class says; a step asks it each time."""

    def owner(method: str) -> type:
        return next(c for c in kind.__mro__ if method in vars(c))

    given = owner(form)
    phi = owner("bind"), owner("input_projection")
    return given is not EquilibriumMap and all(issubclass(given, c) for c in phi)


class JordanMap(EquilibriumMap):
    """phi = sigma((I + U)(V h + W x + b)), the model of the paper's benchmark tables.

    phi does not depend on h_{t-1}: the past enters only as the start h^(0) = h_{t-1} of the
    iteration. Solved to a tolerance it forgets the past, and its implicit gradient through time
    is zero; it is meant for K = 1 or 2 steps of `InexactNewton` with a small eta.

    Args:
        rank: r for U = U1 U2 with U1 (n, r), U2 (r, n); None for a full U. With a full U at
            n = 80, I + U is far from (I - U)^-1 (relative error 0.85); at rank 8 it is 0.06.
            0 leaves out U: a step is then a leaky one without self-feedback.

    Source: Eqs. jordan and linear_approx.

    Example:
        >>> from fixpoint.models import ERNN, JordanMap
        >>> ERNN(3, 8, map=JordanMap(3, 8, rank=2), max_iter=2).l0.map.U1.shape
        torch.Size([8, 2])
    """

    uses_previous_state = False
    default_nonlinearity = "relu"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        rank: int | None = None,
        **options: Unpack[MapOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.rank = rank
        if rank is None:
            self.new_parameter("U", hidden_size, hidden_size, start=small_normal_)
        elif at_least(0, rank=rank):
            self.new_parameter("U1", hidden_size, rank, start=small_normal_)
            self.new_parameter("U2", rank, hidden_size, start=small_normal_)

    def bind(self, x: Tensor) -> Callable[[int, Tensor], Phi]:
        A, W, b = self.as_leaky_step()
        u = F.linear(x, W, b).unbind(0)
        act = ACTIVATIONS[self.nonlinearity]
        return lambda t, h_prev: lambda h: act(torch.addmm(u[t], h, A.mT))

    def as_leaky_step(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (I + U) V, (I + U) W, (I + U) b."""
        if self.rank == 0:
            return self.V, self.W, self.b
        A, W = self.V + self._feedback(self.V), self.W + self._feedback(self.W)
        return A, W, None if self.b is None else self.b + self._feedback(self.b)

    def single_step(self, h: Tensor, h_prev: Tensor, x: Tensor) -> Tensor:
        inner = torch.addmm(F.linear(x, self.W, self.b), h, self.V.mT)
        if self.rank == 0:
            return ACTIVATIONS[self.nonlinearity](inner)
        U: tuple[Tensor, ...] = (self.U,) if self.rank is None else (self.U1, self.U2)
        back = inner
        for factor in reversed(U):
            back = back @ factor.mT
        return ACTIVATIONS[self.nonlinearity](inner + back)

    def _feedback(self, columns: Tensor) -> Tensor:
        return self.U @ columns if self.rank is None else self.U1 @ (self.U2 @ columns)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", rank={self.rank}" if self.rank is not None else "")


class SelfFeedbackMap(EquilibriumMap):
    """phi = sigma(U h + V h_{t-1} + W x + b): the map for equilibria solved to a tolerance.

    Args:
        bound: keep ||U||_2 = bound by `bound_spectral_norm`. Below 1 phi is a contraction, so that
            exactly one equilibrium exists. None leaves U free.

    Source: Eq. h, with one nonlinear layer for phi.

    Example:
        >>> import torch
        >>> from fixpoint import Anderson, Implicit
        >>> from fixpoint.models import ERNN, SelfFeedbackMap
        >>> phi = SelfFeedbackMap(3, 8, bound=0.9)
        >>> layer = ERNN(3, 8, map=phi, solver=Anderson(), backward=Implicit())
        >>> layer(torch.randn(5, 2, 3))[0].shape
        torch.Size([5, 2, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bound: float | None = None,
        **options: Unpack[MapOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.new_parameter("U", hidden_size, hidden_size, start=small_normal_)
        self.bound = bound
        if bound is not None:
            bound_spectral_norm(self, "U", bound=bound)

    def bind(self, x: Tensor) -> Callable[[int, Tensor], Phi]:
        projection, U, V = self.input_projection(x).unbind(0), self.U, self.V
        act = ACTIVATIONS[self.nonlinearity]

        def at(t: int, h_prev: Tensor) -> Phi:
            past = torch.addmm(projection[t], h_prev, V.mT)
            return lambda h: act(torch.addmm(past, h, U.mT))

        return at

    def as_leaky_step(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.U + self.V, self.W, self.b

    def as_self_feedback(self) -> SelfFeedback | None:
        return SelfFeedback(self.U, self.V, self.W, self.b)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", bound={self.bound:g}" if self.bound else "")


class IdentityFeedbackMap(EquilibriumMap):
    """phi = tanh(h + V h_{t-1} + W x + b), the paper's toy model: as many weights as an RNN.

    Each unit is the scalar equilibrium h = tanh(h + alpha) = Phi(alpha). Plain iteration is slow
    where alpha is near 0 (sublinear at 0).

    Source: Eq. val_h.

    Example:
        >>> import torch
        >>> from fixpoint import Newton, Implicit
        >>> from fixpoint.models import ERNN
        >>> layer = ERNN(2, 8, map="identity-feedback", solver=Newton(), backward=Implicit())
        >>> layer(torch.randn(5, 1, 2))[0].shape
        torch.Size([5, 1, 8])
    """

    def bind(self, x: Tensor) -> Callable[[int, Tensor], Phi]:
        projection, V = self.input_projection(x).unbind(0), self.V
        act = ACTIVATIONS[self.nonlinearity]

        def at(t: int, h_prev: Tensor) -> Phi:
            past = torch.addmm(projection[t], h_prev, V.mT)
            return lambda h: act(h + past)

        return at

    def as_leaky_step(self) -> tuple[Tensor, Tensor, Tensor | None]:
        V = self.V
        return V + torch.eye(len(V), dtype=V.dtype, device=V.device), self.W, self.b

    def as_self_feedback(self) -> SelfFeedback:
        return SelfFeedback(None, self.V, self.W, self.b)


class LinearMap(SelfFeedbackMap):
    """phi = U h + V h_{t-1} + W x + b, whose equilibrium has a closed form.

    Args:
        inverse: None iterates on phi. "exact" makes phi the constant map
            (I - U)^-1 (V h_{t-1} + W x + b), "neumann" its approximation (I + U)(...); one step
            of `Picard` then solves it.
        bound: as for `SelfFeedbackMap`.

    Raises:
        ValueError: `inverse` is unknown, or a nonlinearity other than "identity" is given.

    Source: Eqs. linear and linear_approx.

    Example:
        >>> from fixpoint.models import ERNN
        >>> type(ERNN(3, 8, map="linear").l0.map).__name__
        'LinearMap'
    """

    default_nonlinearity = "identity"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        inverse: Literal["exact", "neumann"] | None = None,
        bound: float | None = None,
        **options: Unpack[MapOptions],
    ) -> None:
        if options.get("nonlinearity") not in (None, "identity"):
            raise ValueError("the linear map has no nonlinearity; leave it out")
        super().__init__(input_size, hidden_size, bound=bound, **options)
        if inverse not in (None, "exact", "neumann"):
            raise ValueError(f'inverse must be None, "exact" or "neumann"; got {inverse!r}')
        self.inverse = inverse

    def bind(self, x: Tensor) -> Callable[[int, Tensor], Phi]:
        if self.inverse is None:
            return super().bind(x)
        projection, V = self.input_projection(x).unbind(0), self.V
        # The map of all rows at once: row @ inverse^T.
        inverse_t = self._inverse().mT

        def constant(t: int, h_prev: Tensor) -> Phi:
            z = torch.addmm(projection[t], h_prev, V.mT) @ inverse_t
            return lambda h: z

        return constant

    def as_leaky_step(self) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.inverse is None:
            return super().as_leaky_step()
        inverse = self._inverse()
        return inverse @ self.V, inverse @ self.W, None if self.b is None else inverse @ self.b

    def as_self_feedback(self) -> SelfFeedback | None:
        if self.inverse is None:
            return super().as_self_feedback()
        return SelfFeedback(torch.zeros_like(self.V), *self.as_leaky_step())

    def _inverse(self) -> Tensor:
        """Return (I - U)^-1 or I + U, (n, n)."""
        U = self.U
        one = torch.eye(self.hidden_size, dtype=U.dtype, device=U.device)
        return torch.linalg.inv_ex(one - U)[0] if self.inverse == "exact" else one + U

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", inverse={self.inverse!r}" if self.inverse else "")


class ManifoldMap(EquilibriumMap):
    """phi = sigma(U (h + h_{t-1}) + W x + b) / gamma - h_{t-1}: h_t + h_{t-1} on a manifold.

    Its equilibrium h_t is that of g' = sigma(U (g + h_{t-1}) + W x + b) - gamma (g + h_{t-1}). The
    sum s_t = h_t + h_{t-1} solves gamma s = sigma(U s + W x_t + b) and depends on x_t alone, so
    d h_t / d h_{t-1} = -I: solved exactly, the state keeps all of the past, and gradients through
    time neither vanish nor explode. It is also linear in the past: h_T is the sum of
    (-1)^(T-t) s_t, in which inputs of different time steps do not interact. A few steps of
    `InexactNewton` do not reach the equilibrium; they are a leaky recurrence. With a tolerance and
    `Implicit` all time steps are solved at once, in one batch.

    Args:
        gamma: > 0; phi is a contraction where ||U||_2 < gamma and |sigma'| <= 1.
        bound: keep ||U||_2 = bound by `bound_spectral_norm`; None leaves U free.

    Raises:
        ValueError: gamma is not positive.

    Source: Kag, Zhang, Saligrama (2019), RNNs evolving on an equilibrium manifold: a panacea for
        vanishing and exploding gradients?

    Example:
        >>> import torch
        >>> from fixpoint import Anderson, Implicit
        >>> from fixpoint.models import ERNN, ManifoldMap
        >>> phi = ManifoldMap(3, 8, bound=0.8)
        >>> layer = ERNN(3, 8, map=phi, solver=Anderson(), backward=Implicit())
        >>> layer(torch.randn(5, 2, 3))[0].shape
        torch.Size([5, 2, 8])
    """

    has_V = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        gamma: float = 1.0,
        bound: float | None = None,
        **options: Unpack[MapOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.gamma = positive(gamma=gamma)
        self.new_parameter("U", hidden_size, hidden_size, start=small_normal_)
        self.bound = bound
        if bound is not None:
            bound_spectral_norm(self, "U", bound=bound)

    def bind(self, x: Tensor) -> Callable[[int, Tensor], Phi]:
        projection, U = self.input_projection(x).unbind(0), self.U
        act = ACTIVATIONS[self.nonlinearity]

        def at(t: int, h_prev: Tensor) -> Phi:
            u = torch.addmm(projection[t], h_prev, U.mT)
            return lambda h: act(torch.addmm(u, h, U.mT)) / self.gamma - h_prev

        return at

    def extra_repr(self) -> str:
        bound = f", bound={self.bound:g}" if self.bound else ""
        return super().extra_repr() + f", gamma={self.gamma:g}{bound}"


MAPS: dict[str, type[EquilibriumMap]] = {
    "jordan": JordanMap,
    "self-feedback": SelfFeedbackMap,
    "identity-feedback": IdentityFeedbackMap,
    "linear": LinearMap,
    "manifold": ManifoldMap,
}
"""Every map by the name that `ERNN` and the command line take."""
