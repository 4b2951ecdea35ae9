"""The gated recurrence h <- z h + (p (1 - z) + q) c with a gate z and a candidate c."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fixpoint._messages import unknown_name
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.common.pointwise import SIGMOID, one_minus, sigma, slope
from fixpoint.models.ops.recurrence.arguments import Gradients, Operands
from fixpoint.models.ops.recurrence.autograd import FusedRecurrence, Options, check_shapes
from fixpoint.models.ops.recurrence.registered import register
from fixpoint.models.ops.recurrence.step import Activation


def _step(self: Any, h: Any, p: Any, u: Any, b: Any, w: Any) -> Any:
    z = sigma(SIGMOID, p[0] + (u[0] + b[0]))
    c = sigma(self.activation, p[-1] + (u[-1] + b[1]))
    return (z * h[0] + (w[0] * one_minus(z) + w[1]) * c,), (z, c)


class SharedProductStep(Activation):
    """Gate and candidate with one product, as in FastGRNN."""

    states, kept, products, drives = 1, 2, (0,), (0,)
    step = _step

    def pullback(self, g: Any, h: Any, kept: Any, w: Any) -> Any:
        (x,), (z, c), rest = g, kept, one_minus(kept[0])
        dz = slope(SIGMOID, x * (h[0] - w[0] * c), z)
        dc = slope(self.activation, x * (w[0] * rest + w[1]), c)
        return (x * z,), (dz + dc,), (dz, dc), (x * c * rest, x * c)


class TwoProductsStep(Activation):
    """Gate and candidate with a product each, as in UGRNN."""

    states, kept, products, drives = 1, 2, (0, 1), (0, 1)
    step = _step

    def pullback(self, g: Any, h: Any, kept: Any, w: Any) -> Any:
        (x,), (z, c), rest = g, kept, one_minus(kept[0])
        dz = slope(SIGMOID, x * (h[0] - w[0] * c), z)
        dc = slope(self.activation, x * (w[0] * rest + w[1]), c)
        return (x * z,), (dz, dc), (dz, dc), (x * c * rest, x * c)


class GatedInputs(NamedTuple):
    """The tensors of `gated_scan`."""

    x: Tensor
    W: Tensor | None
    bias: Tensor | None
    V: Tensor
    p: Tensor
    q: Tensor
    h0: Tensor


class GatedRecurrence(FusedRecurrence[GatedInputs]):
    """One product V h serves gate and candidate, or each has its own."""

    name, reference_name, inputs, has_triton = "gated", "gated_scan_reference", GatedInputs, True

    def step_of(self, inputs: GatedInputs) -> type:
        return SharedProductStep if len(inputs.V) == inputs.h0.shape[1] else TwoProductsStep

    def operands(self, inputs: GatedInputs) -> Operands:
        x, W, bias, V, p, q, h0 = inputs
        T, n = len(x), h0.shape[1]
        rows = h0.new_zeros(2, n) if bias is None else bias.view(2, n)
        matrices = None if W is None else W.unflatten(0, (-1, n))
        scalars = p.expand(T).contiguous(), q.expand(T).contiguous()
        return Operands(x, matrices, rows, V.unflatten(0, (-1, n)), scalars, 1, (h0,))

    def of_inputs(self, inputs: GatedInputs, found: Gradients) -> GatedInputs:
        p, q = found.w.sum(1)
        W = None if found.W is None else found.W.flatten(0, 1)
        bias, V = found.bias.flatten(), found.V.flatten(0, 1)
        return GatedInputs(found.x, W, bias, V, p.clone(), q.clone(), found.start[0])


GATED = GatedRecurrence()
register(GATED)
unsupported = GATED.unsupported


def gated_scan(
    x: Tensor,
    V: Tensor,
    p: Tensor | float,
    q: Tensor | float,
    h0: Tensor,
    *,
    activation: str,
    W: Tensor | None = None,
    bias: Tensor | None = None,
    last_only: bool = False,
) -> Tensor:
    r"""Return states of h <- z h + (p (1 - z) + q) c with a gate z and a candidate c.

    With V (n, n), as in FastGRNN (p = sigmoid(zeta), q = sigmoid(nu)), both share one product:

        z = sigmoid(V h + u_t + b_z),  c = sigma(V h + u_t + b_c).

    With V (2 n, n), as in UGRNN (p = 1, q = 0), each has its own, the gate's first:

        z = sigmoid(V_1 h + u_t1 + b_z),  c = sigma(V_2 h + u_t2 + b_c).

    Equal to `gated_scan_reference`, gradients included, to rounding; several times faster with
    numba. Where no gradient is asked for, nothing but the output is stored. A gradient of a
    gradient (create_graph) goes through `gated_scan_reference`.

    The backward pass carries g = dL/dh from the last step to the first. At each step

        dz = g (h - p c) z (1 - z),  dc = g (p (1 - z) + q) sigma'(.),
        dp += sum g c (1 - z),  dq += sum g c,  db_z += sum_B dz,  db_c += sum_B dc,

    d = dz + dc with a shared product, else d = [dz, dc], is the gradient of V h and of u_t, and
    g <- g z + d V + the gradient of this state itself. Then dV = sum_t d^T h, dW = sum_t d^T x_t.

    Args:
        x: u, (T, B, n) or (T, B, 2 n) as V has rows; with W, the input (T, B, d) of u = x W^T,
            which is faster than to compute u first.
        V: (n, n) or (2 n, n).
        p, q: numbers, or tensors without axes.
        h0: the state before the first step, (B, n).
        activation: sigma, a name in `ACTIVATIONS`.
        W: (n, d) or (2 n, d), as many rows as V.
        bias: [b_z, b_c], (2 n,).
        last_only: return only the state after the last step.

    Returns:
        (T, B, n), the state after each time step; (B, n) with last_only.

    Raises:
        ValueError: unknown activation, shapes that do not fit, or `unsupported` gives a reason.

    Source: Kusupati et al. (2018), FastGRNN: a fast, accurate, stable and tiny kilobyte sized gated
    recurrent neural network; Collins, Sohl-Dickstein, Sussillo (2017), Capacity and trainability in
    recurrent neural networks (UGRNN).

    Example:
        >>> import torch
        >>> x, W, V = torch.randn(7, 4, 3), torch.randn(5, 3), torch.randn(5, 5)
        >>> h0, bias = torch.zeros(4, 5), torch.zeros(10)
        >>> gated_scan(x, V, 0.7, 0.02, h0, activation="tanh", W=W, bias=bias).shape
        torch.Size([7, 4, 5])
    """
    inputs = checked(x, W, bias, V, p, q, h0, activation)
    return GATED(inputs, Options(activation, last_only))[0]


def gated_scan_reference(
    x: Tensor,
    V: Tensor,
    p: Tensor | float,
    q: Tensor | float,
    h0: Tensor,
    *,
    activation: str,
    W: Tensor | None = None,
    bias: Tensor | None = None,
    last_only: bool = False,
) -> Tensor:
    """Return the same as `gated_scan`, as a loop of plain operations: the reference.

    Example:
        >>> import torch
        >>> u, V, h0 = torch.randn(7, 4, 10), torch.randn(10, 5), torch.zeros(4, 5)
        >>> gated_scan_reference(u, V, 1.0, 0.0, h0, activation="tanh", last_only=True).shape
        torch.Size([4, 5])
    """
    inputs = checked(x, W, bias, V, p, q, h0, activation)
    return GATED.reference(inputs, Options(activation, last_only))[0]


def checked(
    x: Tensor,
    W: Tensor | None,
    bias: Tensor | None,
    V: Tensor,
    p: Tensor | float,
    q: Tensor | float,
    h0: Tensor,
    activation: str,
) -> GatedInputs:
    """Return all tensors, after a check."""
    if activation not in ACTIVATIONS:
        raise ValueError(unknown_name("activation", activation, ACTIVATIONS))
    if x.dim() != 3 or h0.dim() != 2:
        given = f"{tuple(x.shape)} and {tuple(h0.shape)}"
        raise ValueError(f"x must be (T, B, u or d) and h0 (B, n), but they are {given}")
    (T, _, d), (B, n) = x.shape, h0.shape
    if V.shape not in ((n, n), (2 * n, n)):
        raise ValueError(f"V must be {(n, n)} or {(2 * n, n)}, not {tuple(V.shape)}")
    rows = len(V)
    expected = {"x": (T, B, rows if W is None else d), "W": (rows, d), "bias": (2 * n,)}
    given = f"h0 is {tuple(h0.shape)} and V is {tuple(V.shape)}"
    check_shapes({"x": x, "W": W, "bias": bias}, expected, given)
    p, q = (v if isinstance(v, Tensor) else x.new_tensor(v) for v in (p, q))
    for name, v in {"p": p, "q": q}.items():
        if v.dim():
            raise ValueError(f"{name} must be a number or have no axes, not {tuple(v.shape)}")
    return GatedInputs(x, W, bias, V, p, q, h0)
