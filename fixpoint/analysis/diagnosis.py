"""Diagnosis of a trained ERNN in words: its equilibria and its convergence condition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fixpoint._messages import percent
from fixpoint.analysis.contraction_profile import (
    ContractionProfile,
    contraction_profile,
    equilibrium_gap,
    ernn_of,
)
from fixpoint.analysis.evenly_spaced import evenly_spaced
from fixpoint.analysis.gap_verdict import equilibrium_verdict, gap_quantiles
from fixpoint.analysis.hidden_states import time_first
from fixpoint.models import ERNN
from fixpoint.solution import RESULT_TEXT, Result
from fixpoint.solvers import InexactNewton


class Diagnosis(NamedTuple):
    """Findings of `diagnose`.

    All tensors are on the CPU.

    sentences: in words.
    profile: the convergence condition at the chosen time steps and windows.
    gap: distance of every state from its equilibrium, (T, B); NaN in windows that are not finite.
    result: how each step was solved, (T, B), a `Result` each.
    iterations: updates of each step, (T, B).
    """

    sentences: tuple[str, ...]
    profile: ContractionProfile
    gap: Tensor
    result: Tensor
    iterations: Tensor

    def __str__(self) -> str:
        return "\n".join(self.sentences)


@torch.no_grad()
def diagnose(model: nn.Module, x: Tensor, *, points: int = 32, windows: int = 8) -> Diagnosis:
    """Look at an ERNN on real windows: condition, eta, distance from equilibrium.

    Args:
        model: a one-layer, one-direction `ERNN`, or a model that holds one as `layer`.
        x: windows in the layer's layout, a batch.
        points: most time steps at which the condition is evaluated, spread evenly.
        windows: most windows of x for which it is, spread evenly.

    Raises:
        TypeError: the model holds no `ERNN`.
        ValueError: x does not fit the layer, or the layer makes no updates.

    Source: Theorem 1 and Eq. h of Zhang, Kag, Sullivan, Saligrama (2019), Equilibrated Recurrent
        Neural Network.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import diagnose
        >>> from fixpoint.models import ERNN
        >>> _ = torch.manual_seed(0)
        >>> print(diagnose(ERNN(9, 8), torch.randn(20, 4, 9)).sentences[0])
        ERNN with JordanMap and InexactNewton, K = 1; 4 windows of 20 time steps.
    """
    layer = ernn_of(model, "diagnose")
    was_training = layer.training
    layer.eval()
    try:
        path = layer.trajectory(x)
        steps = time_first(layer, x)
        gap = equilibrium_gap(layer.map, steps, time_first(layer, path.output))
        rows = evenly_spaced(steps.shape[1], windows)
        some = x[rows] if layer.batch_first else x[:, rows]
        profile = contraction_profile(layer, some, points=points)
    finally:
        layer.train(was_training)
    profile = ContractionProfile(*(part.cpu() for part in profile))
    gap, result, iterations = gap.cpu(), path.result.cpu(), path.iterations.cpu()
    sentences = (
        _setting(layer, steps),
        *_solving(layer, result, iterations),
        *describe(profile, gap, _all_eta(layer, len(steps))),
    )
    return Diagnosis(sentences, profile, gap, result, iterations)


def describe(
    profile: ContractionProfile, gap: Tensor | None = None, eta: Tensor | None = None
) -> tuple[str, ...]:
    """Describe a profile and, if given, the gap in sentences; t and k count from 1.

    Args:
        eta: of every time step and update, (T, K); that of the profile's steps if not given.

    Example:
        >>> import torch
        >>> from fixpoint.analysis import contraction_profile, describe
        >>> from fixpoint.models import ERNN
        >>> profile = contraction_profile(ERNN(9, 8), torch.randn(20, 4, 9))
        >>> print(describe(profile)[0])
        The condition ||I + eta f'(h)|| < 1 holds at all of the (t, k, window) examined.
    """
    if eta is None:
        steps = _steps(profile.eta, profile.t.tolist())
    else:
        steps = _steps(eta, list(range(len(eta))))
    quantiles = None if gap is None else gap_quantiles(gap)
    distance = () if quantiles is None else equilibrium_verdict(quantiles)
    return (*_condition(profile), *steps, *distance)


def _setting(layer: ERNN, x: Tensor) -> str:
    solver = layer.fixed_point.solver
    K = f"K = {solver.max_iter}" if not solver.has_tolerance else f"rtol = {solver.rtol:g}"
    # torch names the class of a module with a bounded weight "Parametrized...".
    name = type(layer.map).__name__.removeprefix("Parametrized")
    return (
        f"ERNN with {name} and {type(solver).__name__}, {K}; "
        f"{x.shape[1]} windows of {len(x)} time steps."
    )


def _all_eta(layer: ERNN, T: int) -> Tensor | None:
    """Return eta of every time step, (T, K), not in the profile alone; None without a learned
    one."""
    solver = layer.fixed_point.solver
    if not isinstance(solver, InexactNewton) or solver.has_tolerance:
        return None
    return solver.steps_until(T).expand(T, -1).cpu()


def _solving(layer: ERNN, result: Tensor, iterations: Tensor) -> Iterable[str]:
    lost = (result == Result.NONFINITE).any(0)
    if bool(lost.any()):
        yield f"{int(lost.sum())} of {len(lost)} windows hold NaN or inf and are left out."
    if not layer.fixed_point.solver.has_tolerance:
        return
    seen = result[:, ~lost]
    if not seen.numel():
        return
    fraction = (seen == Result.CONVERGED).double().mean().item()
    mean = iterations[:, ~lost].double().mean().item()
    yield f"The tolerance was reached in {percent(fraction)} of the solves, by {mean:.1f} updates."
    for code in (Result.MAX_ITER, Result.STALLED):
        count = int((seen == code).sum())
        if count:
            yield f"{count} solves ended as {code.name}: {RESULT_TEXT[code]}."


def _condition(profile: ContractionProfile) -> Iterable[str]:
    known = ~profile.norm.isnan()
    if not bool(known.any()):
        yield "No window examined is finite, so the condition is unknown."
        return
    fails = known & ~(profile.norm < 1)
    fraction = 1 - (fails.sum() / known.sum()).item()
    where = "all" if fraction == 1 else "none" if fraction == 0 else percent(fraction)
    yield f"The condition ||I + eta f'(h)|| < 1 holds at {where} of the (t, k, window) examined."
    eta = profile.eta[..., None].to(profile.upper.dtype).expand_as(profile.norm)
    empty, positive = profile.lower.isnan(), profile.upper > 0
    reasons = (
        ("no eta satisfies it: f' + f'^T is indefinite", empty),
        ("eta < 0 and only positive ones satisfy it", ~empty & positive & (eta < 0)),
        ("eta > 0 and only negative ones satisfy it", ~empty & ~positive & (eta > 0)),
        ("eta is 0", ~empty & (eta == 0)),
        ("eta is too large", ~empty & positive & (eta > 0)),
        ("eta is too far below 0", ~empty & ~positive & (eta < 0)),
    )
    for reason, mask in reasons:
        if bool((fails & mask).any()):
            where = _where((fails & mask).any(2), profile.t.tolist())
            fraction = (fails & mask).any(1).any(0).double().mean().item()
            yield f"It fails {where} ({percent(fraction)} of the windows) because {reason}."


def _where(marked: Tensor, times: list[int]) -> str:
    """Say which (t, k), (S, K), of the S time steps examined are marked."""
    updates = marked.shape[1]
    ranges = [_ranges(marked[:, k].tolist(), times) for k in range(updates)]
    if updates > 1 and len(set(ranges)) == 1:
        return f"at t = {ranges[0]} for every k"
    parts = [(f"t = {at}", f" for k = {k + 1}") for k, at in enumerate(ranges) if at]
    return "at " + " and ".join(at + (of if updates > 1 else "") for at, of in parts)


def _steps(eta: Tensor, times: list[int]) -> Iterable[str]:
    """Describe eta, (S, K), of the S time steps given."""
    eta = eta.double()
    negative = eta < 0
    low, high = eta.min().item(), eta.max().item()
    span = f"eta = {low:.3g}" if low == high else f"eta lies between {low:.3g} and {high:.3g}"
    if not bool(negative.any()):
        yield f"{span}; none is negative."
        return
    count = int(negative.sum())
    yield f"{span}; {count} of {eta.numel()} are negative, {_where(negative, times)}."


def _ranges(marked: list[bool], times: list[int]) -> str:
    """Join marked time steps, from 1 on, that are neighbors among the `times` examined."""
    runs: list[list[int]] = []
    before = False
    for t, mark in zip(times, marked, strict=True):
        if mark and before:
            runs[-1][1] = t + 1
        elif mark:
            runs.append([t + 1, t + 1])
        before = mark
    texts = [str(a) if a == b else f"{a}..{b}" for a, b in runs]
    shown = texts if len(texts) <= 8 else [*texts[:7], f"and {len(texts) - 7} more"]
    return ", ".join(shown)
