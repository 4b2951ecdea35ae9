"""Bias of a cheap gradient of an equilibrium: its angle and size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fixpoint._tree import Map, Tree
from fixpoint.backward import Backward, Implicit, Phantom, Unrolled
from fixpoint.fixed_point import FixedPoint

GOOD = 0.9
"""Cosine from which on a gradient points nearly where the exact one does."""


class GradientBias(NamedTuple):
    """Cheap gradients compared with the exact one, all parameters together, (n,) each.

    names: of the ways to differentiate.
    cosine: with the exact gradient; 0 where one of the two is 0.
    size: its norm relative to that of the exact one.
    converged: fraction of samples whose solve has converged; the exact gradient is that of these.
    """

    names: tuple[str, ...]
    cosine: Tensor
    size: Tensor
    converged: float

    def describe(self) -> str:
        """Say the finding in a sentence."""
        parts = [
            f"{name}: cosine {cosine:.3f}, size {size:.3g}"
            for name, cosine, size in zip(
                self.names, self.cosine.tolist(), self.size.tolist(), strict=True
            )
        ]
        good = [
            n for n, cosine in zip(self.names, self.cosine.tolist(), strict=True) if cosine >= GOOD
        ]
        verdict = (
            f"{good[0]} is the first with a cosine of {GOOD:g} or more"
            if good
            else f"none has a cosine of {GOOD:g}: take Implicit()"
        )
        part = "" if self.converged == 1 else f" ({self.converged:.0%} of the samples converged)"
        return f"relative to the exact gradient{part}: {'; '.join(parts)}. Here {verdict}"


def gradient_bias(
    layer: FixedPoint,
    phi: Map,
    z0: Tree,
    loss: Callable[[Tree], Tensor],
    parameters: Iterable[Tensor],
    *,
    backwards: Mapping[str, Backward] | None = None,
    batched: bool = True,
) -> GradientBias:
    """Compare cheap gradients of an equilibrium with the exact one of `Implicit`.

    Each is computed from a solve of its own, so phi must repeat itself. No `.grad` is touched.

    Args:
        layer: `FixedPoint` or `Root` whose solver and policies are used.
        phi: its map.
        z0: start, as the layer takes it.
        loss: of z*, a scalar.
        parameters: tensors that the gradient is taken of.
        backwards: by name, in order of their cost. None takes one step (JFB), phantom gradients of
            5 steps, and the last 10 updates.
        batched: as for `solve`.

    Raises:
        ValueError: no parameter asks for a gradient.

    Example:
        >>> import torch
        >>> from fixpoint import FixedPoint
        >>> from fixpoint.analysis import gradient_bias
        >>> a = torch.tensor([[0.5, 0.0], [0.8, 0.9]], requires_grad=True)
        >>> bias = gradient_bias(
        ...     FixedPoint(), lambda z: z @ a.T + 1, torch.zeros(1, 2), torch.sum, [a]
        ... )
        >>> bool((bias.cosine.diff() > 0).all())
        True
    """
    tensors = [x for x in parameters if x.requires_grad]
    if not tensors:
        raise ValueError("no parameter asks for a gradient: set requires_grad on those to compare")
    if backwards is None:
        backwards = {
            "one step": Phantom(),
            "phantom, 5 steps": Phantom(5),
            "last 10 updates": Unrolled(last=10),
        }

    def gradient(backward: Backward) -> tuple[Tensor, float]:
        kind = type(layer)
        other = kind(layer.solver, backward, failed=layer.failed, on_failure="ignore")
        with torch.enable_grad():
            solution = other(phi, z0, batched=batched)
            found = torch.autograd.grad(loss(solution.z), tensors, allow_unused=True)
        flat = [
            torch.zeros_like(x).flatten() if y is None else y.flatten()
            for x, y in zip(tensors, found, strict=True)
        ]
        return torch.cat([x.double() for x in flat]), float(solution.converged.double().mean())

    exact, converged = gradient(Implicit(on_failure="ignore"))
    cheap = torch.stack([gradient(backward)[0] for backward in backwards.values()])
    length, norm = torch.linalg.vector_norm(cheap, dim=1), torch.linalg.vector_norm(exact)
    product = length * norm
    cosine = torch.where(product > 0, cheap @ exact / torch.where(product > 0, product, 1.0), 0.0)
    return GradientBias(tuple(backwards), cosine, length / norm, converged)
