"""The affine recurrence delta_t = A_t delta_{t-1} + r_t over a whole sequence, and its transpose.

Later element after earlier: (A_l, b_l) after (A_e, b_e) is (A_l A_e, A_l b_e + b_l).
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 32
"""Time steps whose scalar recurrence is one triangular product."""


class AffineScan:
    """delta_t = A_t delta_{t-1} + B_t r_t with delta_0 = 0, as the linear map r -> delta.

    Subclasses fix the form of A_t. `transposed` is the transpose of that map: with it a reversed
    recurrence is solved. Without gradient.
    """

    def forward(self, r: Tensor) -> Tensor:
        """Return delta, (T, B, n), from r, (T, B, n), which may be overwritten."""
        raise NotImplementedError

    def transposed(self, r: Tensor) -> Tensor:
        """Return the transpose applied to r, (T, B, n), which may be overwritten."""
        raise NotImplementedError

    def select(self, samples: Tensor) -> AffineScan:
        """Return the scan of some samples, given by their indices."""
        raise NotImplementedError


class ZeroScan(AffineScan):
    """A = 0: delta = r."""

    def forward(self, r: Tensor) -> Tensor:
        return r

    def transposed(self, r: Tensor) -> Tensor:
        return r

    def select(self, samples: Tensor) -> ZeroScan:
        return self


class ScalarScan(AffineScan):
    """A_t = a_t I, shared by all samples and units: products with triangular matrices.

    Chunks of time are multiplied by M[t, s] = prod_{s < u <= t} a_u, which any sign and any zero
    of a_u suits; what a chunk hands to the next is the same recurrence, one level up.

    Args:
        a: (T,).
    """

    def __init__(self, a: Tensor) -> None:
        self.a = a.detach()
        self._levels: dict[bool, _Level] = {}

    def forward(self, r: Tensor) -> Tensor:
        return self._level(False).apply(r)

    def transposed(self, r: Tensor) -> Tensor:
        return self._level(True).apply(r)

    def select(self, samples: Tensor) -> ScalarScan:
        return self

    def _level(self, reverse: bool) -> _Level:
        if reverse not in self._levels:
            # delta_t = r_t + a_{t+1} delta_{t+1} read backwards
            a = torch.cat([self.a[1:], self.a.new_zeros(1)]) if reverse else self.a
            self._levels[reverse] = _Level(a, reverse)
        return self._levels[reverse]


class _Level:
    """delta_t = r_t + a_t delta_{t-1}, or with `reverse` delta_t = r_t + a_t delta_{t+1}."""

    def __init__(self, a: Tensor, reverse: bool) -> None:
        self.length, self.reverse = len(a), reverse
        size = min(CHUNK, max(len(a), 1))
        self.padding = -len(a) % size
        chunks = torch.cat([a, a.new_zeros(self.padding)]).view(-1, size)
        ordered = chunks.flip(1) if reverse else chunks
        product = torch.eye(size, dtype=a.dtype, device=a.device).repeat(len(chunks), 1, 1)
        for t in range(1, size):
            product[:, t, :t] = ordered[:, t, None] * product[:, t - 1, :t]
        self.matrix = product.flip(1, 2) if reverse else product
        self.enters, self.leaves = (-1, 0) if reverse else (0, -1)
        self.first = chunks[:, self.enters]
        last = self.matrix[:, self.leaves, self.enters] * self.first
        self.next = _Level(last, reverse) if len(chunks) > 1 else None

    def apply(self, r: Tensor) -> Tensor:
        shape = r.shape
        if r.numel() == 0:
            return r
        if self.padding:
            r = torch.cat([r, r.new_zeros(self.padding, *shape[1:])])
        chunks = r.reshape(*self.matrix.shape[:2], -1)
        if self.next is not None:
            carry = self.next.apply((self.matrix[:, self.leaves, None] @ chunks).squeeze(1))
            here, there = (slice(None, -1), slice(1, None))[:: 1 if self.reverse else -1]
            entering = self.first[here, None] * carry[there]
            chunks[here, self.enters] += entering
        return torch.bmm(self.matrix, chunks).view(-1, *shape[1:])[: self.length]


class DiagonalScan(AffineScan):
    """A_t diagonal, B_t diagonal or the identity.

    Args:
        a: (T, B, n).
        scale: the diagonal of B_t, (T, B, n), or None.
    """

    def __init__(self, a: Tensor, scale: Tensor | None = None) -> None:
        self.a, self.scale = a, scale

    def forward(self, r: Tensor) -> Tensor:
        return diagonal_scan(self.a, r if self.scale is None else self.scale * r)

    def transposed(self, r: Tensor) -> Tensor:
        delta = diagonal_scan(self.a, r, reverse=True)
        return delta if self.scale is None else self.scale * delta

    def select(self, samples: Tensor) -> DiagonalScan:
        scale = None if self.scale is None else self.scale[:, samples]
        return DiagonalScan(self.a[:, samples], scale)


class DenseScan(AffineScan):
    """A_t and B_t matrices of each sample.

    Args:
        a: (T, B, n, n).
        scale: B_t, (T, B, n, n), or None for the identity.
    """

    def __init__(self, a: Tensor, scale: Tensor | None = None) -> None:
        self.a, self.scale = a, scale

    def forward(self, r: Tensor) -> Tensor:
        return dense_scan(self.a, r if self.scale is None else _multiply(self.scale, r))

    def transposed(self, r: Tensor) -> Tensor:
        delta = dense_scan(_reversed(self.a.mT), r.flip(0)).flip(0)
        return delta if self.scale is None else _multiply(self.scale.mT, delta)

    def select(self, samples: Tensor) -> DenseScan:
        scale = None if self.scale is None else self.scale[:, samples]
        return DenseScan(self.a[:, samples], scale)


def diagonal_scan(a: Tensor, r: Tensor, *, reverse: bool = False) -> Tensor:
    """Return delta_t = a_t * delta_{t-1} + r_t, or with `reverse` delta_t = a_{t+1} * delta_{t+1} +
    r_t.

    A loop over time on the CPU, a Triton kernel on a CUDA device where Triton is installed, else
    log2(T) rounds of the associative scan.

    Args:
        a, r: (T, B, n).
    """
    if r.device.type == "cpu":
        return _loop(a, r, reverse)
    if r.device.type == "cuda" and _has_triton():
        from fixpoint.sequence.triton_kernels import diagonal_scan as kernel_scan

        return kernel_scan(a.contiguous(), r.contiguous(), reverse=reverse)
    return doubling_scan(_reversed(a), r.flip(0)).flip(0) if reverse else doubling_scan(a, r)


def dense_scan(a: Tensor, r: Tensor) -> Tensor:
    """Return delta_t = A_t delta_{t-1} + r_t for A, (T, B, n, n), and r, (T, B, n)."""
    if r.device.type != "cpu":
        return doubling_scan(a, r)
    delta, carry = torch.empty_like(r), torch.zeros_like(r[:1])[0]
    for a_t, r_t, out in zip(a.unbind(0), r.unbind(0), delta.unbind(0), strict=True):
        carry = torch.baddbmm(r_t.unsqueeze(2), a_t, carry.unsqueeze(2)).squeeze(2)
        out.copy_(carry)
    return delta


def doubling_scan(a: Tensor, r: Tensor) -> Tensor:
    """Return recurrence of diagonal or dense A by log2(T) rounds over all t at once, for any T."""
    times = torch.mul if a.dim() == r.dim() else _multiply
    step = 1
    while step < len(r):
        r = torch.cat([r[:step], r[step:] + times(a[step:], r[:-step])])
        later, earlier = a[step:], a[:-step]
        a = torch.cat([a[:step], later * earlier if a.dim() == r.dim() else later @ earlier])
        step *= 2
    return r


def _loop(a: Tensor, r: Tensor, reverse: bool) -> Tensor:
    T, delta = len(r), torch.empty_like(r)
    rows, factors, out = r.unbind(0), a.unbind(0), delta.unbind(0)
    order = range(T - 1, -1, -1) if reverse else range(T)
    for i, t in enumerate(order):
        if i == 0:
            out[t].copy_(rows[t])
        elif reverse:
            torch.addcmul(rows[t], factors[t + 1], out[t + 1], out=out[t])
        else:
            torch.addcmul(rows[t], factors[t], out[t - 1], out=out[t])
    return delta


def _multiply(a: Tensor, v: Tensor) -> Tensor:
    return (a @ v.unsqueeze(-1)).squeeze(-1)


def _reversed(a: Tensor) -> Tensor:
    """Return factors of the reversed recurrence, read from the end: 0, a_T, .., a_2."""
    return torch.cat([torch.zeros_like(a[:1]), a[1:].flip(0)])


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
