"""One recurrent layer as plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fixpoint.models import ACTIVATIONS

Factors = tuple[Tensor, ...]
"""A matrix as a product of one or two factors, the left one first."""

Observer = Callable[[str, Tensor], Tensor]
"""Called with the name and value of each intermediate result; returns the value to use."""

Kind = Literal["leaky", "mixed", "gru", "lstm", "equilibrium"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """One layer of a recurrence, from x_t and h_{t-1} to h_t.

    With q = W x, r = V h and b in blocks of n rows, a block for each gate:

    - "leaky": p = q + r + b, with feedback p + U p; h <- h + gain sigma(p) - leak h, K times.
    - "mixed": z = sigmoid(q_1 + r_1 + b_1), c = sigma(q_2 + r_2 + b_2);
      h <- z h + (zeta (1 - z) + nu) c. FastGRNN has one block of rows for both.
    - "gru": s, z = sigmoid of blocks 1, 2; c = tanh(q_3 + b_3 + s (r_3 + recurrent_bias));
      h <- z h + (1 - z) c.
    - "lstm": i, f, o = sigmoid of blocks 1, 2, 4; c <- f c + i tanh(block 3); h <- o tanh(c).
    - "equilibrium": see `Equilibrium`.

    Args:
        kind: see above.
        recurrent, input: factors of V (rows, n) and W (rows, d).
        feedback: factors of U (n, n), or none.
        bias: b (blocks, n).
        recurrent_bias: (1, n) of a GRU.
        nonlinearity: sigma, a name in `ACTIVATIONS`.
        leak, gain: (T, K), or (1, K) where all time steps have the same.
        mix: zeta and nu, (2,).
    """

    kind: Kind = "leaky"
    recurrent: Factors
    input: Factors
    feedback: Factors = ()
    bias: Tensor
    recurrent_bias: Tensor | None = None
    nonlinearity: str = "tanh"
    leak: Tensor | None = None
    gain: Tensor | None = None
    mix: Tensor | None = None

    @property
    def size(self) -> int:
        """Units n of the output h."""
        return self.bias.shape[1]

    @property
    def state_size(self) -> int:
        """Numbers that are carried to the next time step: h, and c of an LSTM."""
        return 2 * self.size if self.kind == "lstm" else self.size

    @property
    def rows(self) -> int:
        """Rows of V and W: n for each gate with weights of its own."""
        return len(self.recurrent[0])

    @property
    def updates(self) -> int:
        """K, updates of h in one time step."""
        return 1 if self.gain is None else self.gain.shape[1]

    @property
    def timesteps(self) -> int:
        """Time steps with a leak and gain of their own; 1 where all have the same."""
        return 1 if self.gain is None else len(self.gain)

    @property
    def functions(self) -> set[str]:
        """Nonlinear functions that the layer evaluates."""
        if self.kind in ("gru", "lstm"):
            return {"sigmoid", "tanh"}
        return {self.nonlinearity} | ({"sigmoid"} if self.kind == "mixed" else set())

    @property
    def matrices(self) -> dict[str, Tensor]:
        """Every factor by its name: V, W and U, of two factors V1 and V2, ..."""
        named: dict[str, Tensor] = {}
        for name, factors in (("V", self.recurrent), ("W", self.input), ("U", self.feedback)):
            for i, factor in enumerate(factors):
                named[name if len(factors) == 1 else f"{name}{i + 1}"] = factor
        return named

    @property
    def multiplications(self) -> int:
        """Products of a weight and a value in one time step."""
        inputs = sum(factor.numel() for factor in self.input)
        products = sum(factor.numel() for factor in (*self.recurrent, *self.feedback))
        elementwise = 2 if self.kind == "leaky" else 3
        return inputs + self.updates * (products + elementwise * self.size)

    def step(
        self, x: Tensor, state: Tensor, t: int | Tensor, watch: Observer = lambda name, value: value
    ) -> Tensor:
        """Return the state, (B, state_size), after x_t, (B, d), and the state before; h comes
        first.
        """
        h = watch("h", state[:, : self.size])
        q = watch("p", _apply(self.input, watch("x", x), "W", watch))
        if self.kind == "leaky":
            return self._leaky(q, h, t, watch)
        r = watch("p", _apply(self.recurrent, h, "V", watch))
        if self.kind == "mixed":
            return self._mixed(q + r, h, watch)
        if self.kind == "gru":
            return self._gru(q, r, h, watch)
        return self._lstm(q + r, state[:, self.size :], watch)

    def _leaky(self, q: Tensor, h: Tensor, t: int | Tensor, watch: Observer) -> Tensor:
        sigma = ACTIVATIONS[self.nonlinearity]
        for k in range(self.updates):
            p = q + watch("p", _apply(self.recurrent, watch("h", h), "V", watch)) + self.bias[0]
            if self.feedback:
                p = p + watch("p", _apply(self.feedback, watch("g", p), "U", watch))
            leak, gain = (
                row(v, t)[..., k : k + 1] for v in (self.leak, self.gain) if v is not None
            )
            h = h + gain * sigma(watch("p", p)) - leak * h
        return h

    def _mixed(self, p: Tensor, h: Tensor, watch: Observer) -> Tensor:
        assert self.mix is not None
        z = watch("p", p[:, : self.size] + self.bias[0]).sigmoid()
        c = ACTIVATIONS[self.nonlinearity](watch("p", p[:, -self.size :] + self.bias[1]))
        return z * h + (self.mix[0] * (1 - z) + self.mix[1]) * c

    def _gru(self, q: Tensor, r: Tensor, h: Tensor, watch: Observer) -> Tensor:
        n = self.size
        assert self.recurrent_bias is not None
        s = watch("p", q[:, :n] + r[:, :n] + self.bias[0]).sigmoid()
        z = watch("p", q[:, n : 2 * n] + r[:, n : 2 * n] + self.bias[1]).sigmoid()
        inner = watch("p", r[:, 2 * n :] + self.recurrent_bias)
        c = watch("p", q[:, 2 * n :] + self.bias[2] + s * inner).tanh()
        return z * h + (1 - z) * c

    def _lstm(self, p: Tensor, c: Tensor, watch: Observer) -> Tensor:
        p = watch("p", p + self.bias.flatten())
        i, f, g, o = p.chunk(4, 1)
        c = watch("c", f.sigmoid() * c + i.sigmoid() * g.tanh())
        return torch.cat([o.sigmoid() * c.tanh(), c], 1)

    def to(self, dtype: torch.dtype) -> Recurrence:
        """Return the same in another precision, apart from any graph."""
        changes: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changes[name] = value.detach().to(dtype)
            elif isinstance(value, tuple):
                changes[name] = tuple(part.detach().to(dtype) for part in value)
        if self.leak is self.gain and self.gain is not None:
            changes["leak"] = changes["gain"]
        return replace(self, **changes)


def row(values: Tensor, t: int | Tensor) -> Tensor:
    """Return the values of time step t, or of each t (B,); one row is that of every time step."""
    return values[0] if len(values) == 1 else values[t]


def _apply(factors: Factors, value: Tensor, name: str, watch: Observer) -> Tensor:
    """Return the product of the factors with value (B, columns); the value between them is name +
    "2".
    """
    if len(factors) == 2:
        value = watch(name + "2", value @ factors[1].mT)
    return value @ factors[0].mT
