"""The fused recurrences for tests: random arguments, and outcomes to compare."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from fixpoint.models.ops.recurrence.gated import gated_scan, gated_scan_reference
from fixpoint.models.ops.recurrence.gated import unsupported as gated_unsupported
from fixpoint.models.ops.recurrence.leaky import fused_scan, scan_reference
from fixpoint.models.ops.recurrence.leaky import unsupported as leaky_unsupported


def leaky_problem(T, B, n, K, d=0, dtype=torch.float64, seed=0, grad=True):
    """Arguments by name; |A| < 1 keeps the states of any length moderate. d = 0: x is u itself."""
    shapes = {"x": (T, B, d or n), "A": (n, n), "a": (T, K), "b": (T, K), "h0": (B, n)}
    if d:
        shapes |= {"W": (n, d), "bias": (n,)}
    return _random(shapes, "A", n, dtype, seed, grad)


def gated_problem(T, B, n, products, d=0, dtype=torch.float64, seed=0, grad=True):
    rows = products * n
    shapes = {"x": (T, B, d or rows), "V": (rows, n), "p": (), "q": (), "h0": (B, n)}
    if d:
        shapes |= {"W": (rows, d), "bias": (2 * n,)}
    return _random(shapes, "V", n, dtype, seed, grad)


def _random(shapes, recurrent, n, dtype, seed, grad):
    g = torch.Generator().manual_seed(seed)
    out = {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in shapes.items()}
    out[recurrent] *= 0.5 / n**0.5
    return {k: v.to(dtype).requires_grad_(grad) for k, v in out.items()}


class Operation(NamedTuple):
    """A fused recurrence in one of its variants, and its twin of plain operations."""

    kind: str
    variant: int
    """K of the leaky recurrence, products with V of the gated one."""
    fused: Callable
    reference: Callable
    unsupported: Callable
    make: Callable

    def problem(self, T, B, n, d=0, **options):
        return self.make(T, B, n, self.variant, d, **options)


def leaky(K):
    return Operation("leaky", K, fused_scan, scan_reference, leaky_unsupported, leaky_problem)


def gated(products):
    functions = gated_scan, gated_scan_reference, gated_unsupported, gated_problem
    return Operation("gated", products, *functions)


OPERATIONS = {
    "leaky, K = 1": leaky(1),
    "leaky, K = 3": leaky(3),
    "gated, shared product": gated(1),
    "gated, two products": gated(2),
}


def outcome(scan, arguments, **options):
    """The output and the gradient of each argument, for a fixed random gradient of the output."""
    y = scan(**arguments, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    asked = [v for v in arguments.values() if v.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, asked, weights.to(y))]


def connected(reference):
    """The reference, with a gradient of zero for every argument even without a time step."""

    def scan(**arguments):
        return reference(**arguments) + 0 * sum(
            v.sum() for v in arguments.values() if isinstance(v, torch.Tensor)
        )

    return scan


def assert_same(got, expected, eps_factor=1e3):
    """Equal up to rounding: sums of some hundred terms, relative to the largest. A single number is
    a sum over all steps, of terms as large as the other gradients.
    """
    sizes = [e.abs().max().item() if e.numel() else 0.0 for e in expected]
    for g, e, size in zip(got, expected, sizes, strict=True):
        assert g.shape == e.shape
        scale = max(sizes) if e.numel() == 1 else size
        torch.testing.assert_close(g, e, rtol=0, atol=eps_factor * torch.finfo(e.dtype).eps * scale)
