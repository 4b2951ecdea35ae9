"""Hidden states of any recurrent layer over time, and gradients through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fixpoint.models import ERNN

State = Any
"""hx of a layer: a tensor (L, B, n), or a tuple of them (LSTM)."""


def hidden_states(layer: nn.Module, x: Tensor, *, batch_size: int = 512) -> Tensor:
    """Return h_1 .. h_T of a recurrent layer, (T, B, n), without gradient.

    Args:
        layer: called as `output, h_n = layer(x)`: `ERNN`, `torch.nn.RNN`, `LSTM`, `GRU`, or a
            model that holds one as its attribute `layer`.
        x: windows in the layer's layout, (T, B, d) or (B, T, d).
        batch_size: windows at a time.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import hidden_states
        >>> hidden_states(torch.nn.LSTM(9, 8, batch_first=True), torch.randn(4, 20, 9)).shape
        torch.Size([20, 4, 8])
    """
    layer, x = recurrent_layer(layer), time_first(layer, x)
    first = getattr(layer, "batch_first", False)
    parts = []
    with torch.no_grad():
        for rows in x.split(batch_size, dim=1):
            output = layer(rows.transpose(0, 1) if first else rows)[0]
            parts.append(output.transpose(0, 1) if first else output)
    return torch.cat(parts, 1)


def gradient_norms(layer: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute |d loss / d h_t| over time, (T, B), in the 2-norm of each sample's state.

    Falling towards t = 1 the gradient vanishes, rising it explodes. The last row is that of the
    loss itself. For several layers the state is that of all of them, for an LSTM (h, c).

    Args:
        layer: as for `hidden_states`.
        x: windows in the layer's layout.
        loss: of the last output, (B, n), a scalar that is a sum over the samples.

    Raises:
        ValueError: the layer is bidirectional.

    Source: Pascanu, Mikolov, Bengio (2013), On the difficulty of training recurrent neural
        networks, Eq. 5; the paper's section "Vanishing and exploding gradients".

    Example:
        >>> import torch
        >>> from fixpoint.analysis import gradient_norms
        >>> layer = torch.nn.RNN(9, 8)
        >>> gradient_norms(layer, torch.randn(20, 4, 9), lambda h: h.square().sum()).shape
        torch.Size([20, 4])
    """
    with torch.enable_grad():
        states, output = _unrolled_states(recurrent_layer(layer), time_first(layer, x))
        leaves = [part for state in states for part in _parts(state)]
        gradients = torch.autograd.grad(loss(output), leaves, allow_unused=True)
    per = len(_parts(states[0]))
    flat = [_rows(g, leaf) for g, leaf in zip(gradients, leaves, strict=True)]
    return torch.stack(
        [torch.cat(flat[i : i + per], 1).norm(dim=1) for i in range(0, len(flat), per)]
    )


def jacobian_spectrum(layer: nn.Module, x: Tensor, *, times: Sequence[int] | None = None) -> Tensor:
    """Return singular values of d h_T / d h_t, (S, B, n), largest first.

    How much of a change of the state at step t, in each of n directions, is left at the end: all
    near 0 means forgotten, above 1 amplified. For several layers n counts all their units, for an
    LSTM those of (h, c).

    Args:
        layer: as for `hidden_states`.
        x: windows in the layer's layout.
        times: the S time indices t; all T if not given. At T - 1 all values are 1.

    Raises:
        ValueError: the layer is bidirectional.

    Source: Pascanu, Mikolov, Bengio (2013), On the difficulty of training recurrent neural
        networks, section 2.1.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import jacobian_spectrum
        >>> jacobian_spectrum(torch.nn.RNN(9, 8), torch.randn(20, 4, 9), times=[0, 19]).shape
        torch.Size([2, 4, 8])
    """
    with torch.enable_grad():
        states, _ = _unrolled_states(recurrent_layer(layer), time_first(layer, x))
        chosen = [states[t] for t in (range(len(states)) if times is None else times)]
        leaves = [part for state in chosen for part in _parts(state)]
        last = torch.cat([_rows(part, part) for part in _parts(states[-1])], 1)
        rows = [
            torch.autograd.grad(last[:, i].sum(), leaves, retain_graph=True, allow_unused=True)
            for i in range(last.shape[1])
        ]
    per = len(_parts(states[0]))
    J = torch.stack([_matrix(row, leaves, per) for row in rows], 2)  # (S, B, n, n)
    return torch.linalg.svdvals(J.double()).to(x.dtype)


def recurrent_layer(model: nn.Module) -> nn.Module:
    """Return the innermost layer of a model whose wrappers hold the next one as `layer`."""
    while isinstance(inner := getattr(model, "layer", None), nn.Module):
        model = inner
    return model


def time_first(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute x as (T, B, d), whatever the layout of the layer."""
    return x.transpose(0, 1) if getattr(recurrent_layer(layer), "batch_first", False) else x


def _unrolled_states(layer: nn.Module, x: Tensor) -> tuple[list[State], Tensor]:
    """Return the state after each time step as graph nodes, and the last output, (B, n)."""
    states: list[State] = []
    if getattr(layer, "bidirectional", False):
        raise ValueError("a bidirectional layer has no one state at t: take each direction alone")
    if isinstance(layer, ERNN):  # step by step: each t has an eta of its own
        stream = None
        for rows in x:
            _, stream = layer.step(rows, stream)
            states.append(stream.hx)
        return states, states[-1][-1]
    first, hx = getattr(layer, "batch_first", False), None
    for t in range(len(x)):
        _, hx = layer(x[t].unsqueeze(1 if first else 0), hx)
        states.append(hx)
    return states, _parts(hx)[0][-1]


def _parts(state: State) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def _rows(g: Tensor | None, leaf: Tensor) -> Tensor:
    """Compute (L, B, n) as (B, L n), (B, n) as it is; zeros where there is no gradient."""
    g = torch.zeros_like(leaf) if g is None else g
    return g.transpose(0, 1).flatten(1) if g.dim() == 3 else g


def _matrix(gradients: Sequence[Tensor | None], leaves: list[Tensor], per: int) -> Tensor:
    """Return one row of each of the S Jacobians, (S, B, n)."""
    flat = [_rows(g, leaf) for g, leaf in zip(gradients, leaves, strict=True)]
    return torch.stack([torch.cat(flat[i : i + per], 1) for i in range(0, len(flat), per)])
