"""Numbers of an Anderson step on the host: its acceptance, and the weights.

They are a few for each sample, for which the host needs less time than a tensor operation takes
to start. As an operation of torch, it is one where others would be many.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fixpoint.solvers._numbers import ARRAYS, FLOATS, LIBRARY, TENSORS, Arithmetic, Number
from fixpoint.solvers._rowwise import at_least_float32
from fixpoint.solvers._weights import (
    SMALL,
    eliminate,
    eliminate_arrays,
    inner_products,
    orthogonalize,
)

GROWTH = 1.5
"""A step that multiplies |g| by more than this is not accepted."""
RECOVERY = 1.1
"""Growth of a sample's reduced mixing with each accepted step."""


class Scalars(NamedTuple):
    """Scalars of each sample: |g|^2 where the next step starts, the factor of beta, at most 1,
    whether the
    last step was not accepted, 0 or 1, and how many differences are used."""

    merit: Number
    mixing: Number
    rejected: Number
    count: Number


class Step(NamedTuple):
    """fz and g = phi(z) - z, (B, D), where the last step ended or the next one starts, and the
    differences of both from where the last step started, the newest first, (B, D) each."""

    fz: Tensor
    g: Tensor
    df: Sequence[Tensor]
    dg: Sequence[Tensor]


class Options(NamedTuple):
    """Options of `Anderson`; memory: most differences of these states."""

    memory: int
    beta: float
    ridge: float


class Outcome(NamedTuple):
    """Outcome of the mixing; accepted: whether the last step is, (B, 1), None where all are.

    weights: of the differences, a float or (B, 1) each. rest: 1 - beta * mixing, (B, 1); None
    where all are 0. scalars: `Scalars`, and behind them the upper triangle of dG^T dG row by row
    where the host needs it, (B, 4) or (B, 4 + m (m + 1) / 2).
    """

    accepted: Tensor | None
    weights: Sequence[Tensor | float] | Tensor
    rest: Tensor | float | None
    scalars: Tensor


def accept_step(
    kind: Arithmetic,
    accepted: Number,
    merit: Number,
    slope: tuple[Number, Number],
    last: Scalars,
    memory: int,
) -> Scalars:
    """Return the numbers after a step to where |g|^2 = merit.

    Args:
        kind: of the numbers.
        accepted: whether the step is.
        merit: |g|^2 at its end.
        slope: squares of the change of z and of g.
        last: before the step.
        memory: most differences.
    """
    recovered = kind.least(RECOVERY * last.mixing, 1.0)
    count = kind.least(last.count + 1, float(memory))
    if kind.all(accepted):
        return Scalars(merit, recovered, kind.zeros_like(merit), count)
    step, change = slope
    inverse_slope = kind.sqrt(step) / kind.sqrt(change + (change == 0))
    reduced = kind.least(inverse_slope, last.mixing)
    again = (accepted ^ True) & (last.rejected > 0)
    reduced = kind.where(again, kind.least(reduced, last.mixing / 2), reduced)
    return Scalars(
        kind.where(accepted, merit, last.merit),
        kind.where(accepted, recovered, reduced),
        1.0 - accepted * 1.0,
        kind.where(again, 0.0, count),
    )


def mix_on_device(end: Step, start: Step, scalars: Tensor, options: Options) -> Outcome:
    """Compute the weights without a read of the host."""
    g, dg = at_least_float32(end.g), [at_least_float32(x) for x in end.dg]
    step = at_least_float32(end.df[0]) - dg[0]
    merit, moved, change = (x.square().sum(1).to(scalars.dtype) for x in (g, step, dg[0]))
    last = Scalars(*scalars.unbind(1))
    accepted = merit <= GROWTH**2 * last.merit
    new = accept_step(TENSORS, accepted, merit, (moved, change), last, options.memory)
    accepted = accepted.unsqueeze(1)
    fz = at_least_float32(torch.where(accepted, end.fz, start.fz))
    noise = torch.finfo(end.fz.dtype).eps * fz.square().sum(1).sqrt()
    g = torch.where(accepted, g, at_least_float32(start.g))
    weights, _ = orthogonalize(dg, g, noise, options.ridge, new.count)
    rest = (1 - options.beta * new.mixing).unsqueeze(1).to(end.g.dtype)
    new_scalars = torch.stack([x.to(scalars.dtype) for x in new], 1)  # ONNX does not promote
    return Outcome(accepted, weights.to(end.g.dtype).unsqueeze(2), rest, new_scalars)


def mix_in_graph(end: Step, start: Step, scalars: Tensor, options: Options) -> Outcome:
    """Mix as `mix_on_host`, in a graph of the host, by the normal equations where these serve."""
    g, dg = at_least_float32(end.g), [at_least_float32(x) for x in end.dg]
    step = at_least_float32(end.df[0]) - dg[0]
    given = scalars.unbind(1)
    last, merit, moved = Scalars(*given[:4]), _product(g, g), _product(step, step)
    gram = _shifted(given, [_product(dg[0], x) for x in dg], len(start.dg))
    accepted = merit <= GROWTH**2 * last.merit
    new = accept_step(TENSORS, accepted, merit, (moved, gram[0][0]), last, options.memory)
    rows = accepted.unsqueeze(1)
    fz = at_least_float32(torch.where(rows, end.fz, start.fz))
    g = torch.where(rows, g, at_least_float32(start.g))
    noise = torch.finfo(end.fz.dtype).eps * _product(fz, fz).sqrt()
    used = [[torch.where(new.count > i, r[0], 0.0), *r[1:]] for i, r in enumerate(gram)]
    right, least = [_product(g, x) for x in dg], torch.finfo(g.dtype).eps ** (1 / 16)
    found, sound = eliminate(TENSORS, used, right, noise, options.ridge, least)
    weights = torch.stack(found)
    sound = sound & weights.isfinite().all(0)

    def as_they_are(weights: Tensor, *given: Tensor) -> Tensor:
        return weights.clone()

    def carefully(
        weights: Tensor, sound: Tensor, g: Tensor, noise: Tensor, count: Tensor, *dg: Tensor
    ) -> Tensor:
        careful, _ = orthogonalize(dg, g, noise.to(g.dtype), options.ridge, count)
        return torch.where(sound, weights, careful.to(weights.dtype))

    operands = (weights, sound, g, noise, new.count, *dg)
    weights = torch.cond(sound.all(), as_they_are, carefully, operands)
    rest = (1 - options.beta * new.mixing).unsqueeze(1).to(end.g.dtype)
    numbers = [*new, *chain.from_iterable(gram)]
    new_scalars = torch.stack([x.to(scalars.dtype) for x in numbers], 1)  # ONNX does not promote
    return Outcome(rows, weights.to(end.g.dtype).unsqueeze(2), rest, new_scalars)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each sample, (B,), in float64."""
    return (a * b).sum(1).to(torch.float64)


def mix_on_host(end: Step, start: Step, scalars: Tensor, options: Options) -> Outcome:
    """Compute the weights with numbers that the host reads."""
    B = end.fz.shape[0]
    if B == 1:
        return _mix(FLOATS, end, start, scalars.tolist()[0], options)
    with np.errstate(all="ignore"):
        return _mix(ARRAYS, end, start, scalars.numpy().T, options)


def _mix(kind: Arithmetic, end: Step, start: Step, given: Any, options: Options) -> Outcome:
    fz, g, df, dg = end
    n, accepted_rows = len(dg), None
    products = _numbers(kind, _products(g, dg))
    last, merit, right = Scalars(*given[:4]), products[0], products[1 : n + 1]
    gram = _shifted(given, products[n + 2 :], len(start.dg))
    accepted, slope = merit <= GROWTH**2 * last.merit, (merit, merit)
    if not kind.all(accepted):
        accepted_rows = _column(accepted, torch.bool)
        fz, g = (torch.where(accepted_rows, a, b) for a, b in ((fz, start.fz), (g, start.g)))
        wide = [at_least_float32(x) for x in (df[0] - dg[0], g, *dg)]
        moved = torch.linalg.vecdot(wide[0], wide[0])
        numbers = _numbers(kind, torch.stack((moved, *inner_products(wide[1], wide[2:]))))
        slope, right = (numbers[0], products[n + 2]), numbers[1:]
    new = accept_step(kind, accepted, merit, slope, last, options.memory)
    used = gram
    if not kind.all(new.count >= n):
        used = [[kind.where(new.count > i, r[0], 0.0), *r[1:]] for i, r in enumerate(gram)]
    wide_fz = at_least_float32(fz)
    (size,) = _numbers(kind, torch.linalg.vecdot(wide_fz, wide_fz).unsqueeze(0))
    noise = torch.finfo(fz.dtype).eps * kind.sqrt(size)
    least = torch.finfo(wide_fz.dtype).eps ** (1 / 16)
    solve: Any = eliminate_arrays if kind is ARRAYS else partial(eliminate, kind)
    weights, sound = solve(used, right, noise, options.ridge, least)
    sound = sound & (sum(weights) * 0 == 0)  # finite
    if not kind.all(sound):
        weights = _carefully(kind, weights, sound, Step(fz, g, df, dg), noise, new.count, options)
    rest = 1 - options.beta * new.mixing
    return Outcome(
        accepted_rows,
        _tensors(weights, fz.dtype),
        None if kind.all(rest == 0) else _tensors([rest], fz.dtype)[0],
        _rows([*new, *chain.from_iterable(gram)]),
    )


def _carefully(
    kind: Arithmetic,
    weights: list[Number],
    sound: Number,
    step: Step,
    noise: Number,
    count: Number,
    options: Options,
) -> list[Number]:
    """Return the weights, of the samples that are not sound from the differences themselves."""
    g, dg = at_least_float32(step.g), [at_least_float32(x) for x in step.dg]
    if kind is FLOATS:
        noise, count = torch.tensor([[noise], [count]], dtype=g.dtype)
        return orthogonalize(dg, g, noise, options.ridge, count)[0][:, 0].tolist()
    rows = torch.from_numpy(np.flatnonzero(~sound))
    noise, count = (torch.from_numpy(x).to(g.dtype)[rows] for x in (noise, count))
    careful, _ = orthogonalize([x[rows] for x in dg], g[rows], noise, options.ridge, count)
    for weight, new in zip(weights, careful.double().numpy(), strict=True):
        weight[rows.numpy()] = new
    return weights


def _products(g: Tensor, dg: Sequence[Tensor]) -> Tensor:
    """Multiply g and the newest difference with g and the differences, (2 (m + 1), B)."""
    if g.numel() <= SMALL:
        A = at_least_float32(torch.stack((g, *dg)))
        return torch.linalg.vecdot(A, A[:2].unsqueeze(1)).flatten(0, 1)
    g, dg = at_least_float32(g), [at_least_float32(x) for x in dg]
    right = [torch.linalg.vecdot(g, x) for x in (g, *dg)]
    return torch.stack([*right, right[1], *(torch.linalg.vecdot(dg[0], x) for x in dg)])


def _shifted(given: Sequence[Number], row: Sequence[Number], n: int) -> list[Sequence[Number]]:
    """Return the upper triangle of dG^T dG with a row for the newest of `len(row)` differences."""
    gram, first = [row], 4
    for i in range(len(row) - 1):
        gram.append(given[first : first + len(row) - 1 - i])
        first += n - i
    return gram


def _numbers(kind: Arithmetic, x: Tensor) -> Any:
    """Return the rows of a (n, B) matrix in float64."""
    return x.flatten().tolist() if kind is FLOATS else x.double().numpy()


def _rows(numbers: Sequence[Number]) -> Tensor:
    """Return numbers of each sample as a matrix, (B, n)."""
    return torch.from_numpy(np.array(numbers).reshape(len(numbers), -1)).T


def _column(numbers: Number, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.reshape(numbers, (-1, 1))).to(dtype)


def _tensors(numbers: Sequence[Number], dtype: torch.dtype) -> Sequence[Tensor | float] | Tensor:
    """Return floats, or (B, 1) each; a float is rounded as float32 and float64 tensors are."""
    if isinstance(numbers[0], float) and dtype in (torch.float32, torch.float64):
        return numbers
    if isinstance(numbers, np.ndarray):
        return torch.from_numpy(numbers).to(dtype).unsqueeze(2)
    return list(_rows(numbers).to(dtype).T.unsqueeze(2))


def as_tensor(weights: Sequence[Tensor | float] | Tensor, like: Tensor) -> Tensor:
    """Return weights of `Outcome` as a matrix in the dtype of another tensor, (m, B)."""
    if isinstance(weights, Tensor):
        return weights.squeeze(2).to(like.dtype)
    if isinstance(weights[0], float):
        return torch.tensor(weights, dtype=like.dtype, device=like.device).unsqueeze(1)
    return torch.stack(cast("list[Tensor]", weights)).squeeze(2).to(like.dtype)


LIBRARY.define(
    "mix(Tensor fz, Tensor g, Tensor[] df, Tensor[] dg, Tensor start_fz, Tensor start_g, "
    "Tensor scalars, int last, int memory, float beta, float ridge) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _operation(
    fz: Tensor,
    g: Tensor,
    df: list[Tensor],
    dg: list[Tensor],
    start_fz: Tensor,
    start_g: Tensor,
    scalars: Tensor,
    last: int,
    memory: int,
    beta: float,
    ridge: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    start = Step(start_fz, start_g, df[:last], dg[:last])
    result = mix_on_host(Step(fz, g, df, dg), start, scalars, Options(memory, beta, ridge))
    accepted, weights, rest, new = result
    if accepted is None:
        accepted = g.new_ones(len(g), 1, dtype=torch.bool)
    if rest is None:
        rest = g.new_zeros(len(g), 1)
    rest = as_tensor([rest], g).view(-1, 1)
    return accepted, as_tensor(weights, g).unsqueeze(2), rest, new


LIBRARY.impl("mix", _operation, "CPU")


def mix_unseen(end: Step, start: Step, scalars: Tensor, options: Options) -> Outcome:
    """Return `mix_on_host` as one operation, so that nothing in it counts as a read of the host."""
    accepted, weights, rest, new = torch.ops.fixpoint.mix(
        end.fz,
        end.g,
        list(end.df),
        list(end.dg),
        start.fz,
        start.g,
        scalars,
        len(start.dg),
        *options,
    )
    return Outcome(accepted, weights, rest, new)
