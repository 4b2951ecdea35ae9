"""The two passes of leaky and gated recurrences by the kernels of `triton_recurrence`."""

from __future__ import annotations

import torch
from torch import Tensor

from fixpoint.models.ops.common import triton_recurrence as kernels
from fixpoint.models.ops.common.activations import ACTIVATIONS
from fixpoint.models.ops.recurrence.arguments import BackwardArguments, ForwardArguments
from fixpoint.models.ops.recurrence.step import Step

NAMES = tuple(ACTIVATIONS)
MAX_SIZE = kernels.MAX_SIZE


def forward(arguments: ForwardArguments) -> None:
    step, operands, (h,), (S,), (O,), kept, every = arguments
    kind, u, bias = _kind(step), operands.drives(), None
    if kind:
        bias = operands.bias.contiguous()
    else:
        u = [u[0] + operands.bias]
    kernels.forward(
        kernels.Forward(
            kind,
            NAMES[step.activation],
            tuple([x.contiguous() for x in u]),
            operands.V.unbind(),
            _of_steps(operands.w),
            bias,
            operands.K,
            h,
            S,
            O,
            kept,
            every,
        )
    )


def backward(arguments: BackwardArguments) -> tuple[Tensor, Tensor]:
    step, (G,), V, w, K, _, (g,), (S,), kept, D = arguments
    name, scalars = NAMES[step.activation], _of_steps(w)
    given = kernels.Backward(_kind(step), name, G, V.unbind(), scalars, K, g, S, kept, D)
    dw, dbias = kernels.backward(given)
    if dbias is None:
        dbias = D[0].sum((0, 1), dtype=torch.float32).to(g.dtype).unsqueeze(0)
    return dw, dbias


def _kind(step: Step) -> int:
    """Return 0 for a leaky recurrence, else gated, of this many products."""
    return len(step.products) if step.kept == 2 else 0


def _of_steps(w: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    a, b = w
    return a.contiguous(), b.contiguous()
