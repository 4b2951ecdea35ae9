"""Time solves through time of a map in Python against hand-written loops of the same method.

h_t = tanh(U h_t + V h_{t-1} + W x_t), B = 128, D = 80, rtol 1e-3, `Implicit`. The hand-written
forms make the same test of every sample and solve the adjoint by the same method, without
results, safeguards or frozen samples: what a user would write for one experiment. Minima of
interleaved runs in one process: ratios hold where times drift.
Run: python benchmarks/through_time.py [--quick]
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable

import torch
from recurrent import minima
from torch import Tensor

from fixpoint import Anderson, Broyden, FixedPoint, Picard
from fixpoint.solvers import Solver

B, D, INPUTS, T = 128, 80, 9, 32
RTOL = 1e-3
Phi = Callable[[Tensor], Tensor]
SOLVERS: dict[str, Callable[[], Solver]] = {
    "Picard": lambda: Picard(rtol=RTOL, atol=0),
    "Anderson": lambda: Anderson(rtol=RTOL, atol=0),
    "Broyden": lambda: Broyden(rtol=RTOL, atol=0),
}


def converged(z: Tensor, fz: Tensor) -> bool:
    return bool(((fz - z).norm(dim=1) <= RTOL * fz.norm(dim=1)).all())


def picard(phi: Phi, z: Tensor) -> Tensor:
    for _ in range(50):
        fz = phi(z)
        if converged(z, fz):
            return z
        z = fz
    return z


def anderson(phi: Phi, z: Tensor, memory: int = 5) -> Tensor:
    df: list[Tensor] = []
    dg: list[Tensor] = []
    before: tuple[Tensor, Tensor] | None = None
    for _ in range(50):
        fz = phi(z)
        if converged(z, fz):
            return z
        g = fz - z
        if before is None:
            new = fz
        else:
            df, dg = [*df, fz - before[0]][-memory:], [*dg, g - before[1]][-memory:]
            G, F = torch.stack(dg, 2), torch.stack(df, 2)
            gram = G.mT @ G
            gram = gram + 1e-7 * torch.diag_embed(gram.diagonal(dim1=1, dim2=2))
            weights = torch.linalg.solve(gram, G.mT @ g.unsqueeze(2))
            new = fz - (F @ weights).squeeze(2)
        before, z = (fz, g), new
    return z


def broyden(phi: Phi, z: Tensor) -> Tensor:
    """Good Broyden on g = phi(z) - z: B^-1 = -I + sum u v^T, by the formula of Sherman-Morrison."""
    us: list[Tensor] = []
    vs: list[Tensor] = []

    def times(x: Tensor, left: list[Tensor], right: list[Tensor]) -> Tensor:
        out = -x
        for u, v in zip(left, right, strict=True):
            out = out + u * (v * x).sum(1, keepdim=True)
        return out

    fz = phi(z)
    g = fz - z
    for _ in range(50):
        if converged(z, fz):
            return z
        step = -times(g, us, vs)
        z = z + step
        fz = phi(z)
        new = fz - z
        change, g = new - g, new
        moved = times(change, us, vs)
        v = times(step, vs, us)
        us.append((step - moved) / (v * change).sum(1, keepdim=True))
        vs.append(v)
    return z


def by_hand(method: Callable[[Phi, Tensor], Tensor], phi: Phi, z: Tensor) -> Tensor:
    """The equilibrium, whose hook solves the adjoint u = J^T u + g."""
    with torch.no_grad():
        z = method(phi, z)
    if not torch.is_grad_enabled():
        return z
    start = z.detach().requires_grad_()
    twin = phi(start)
    fz = phi(z)

    def adjoint(g: Tensor) -> Tensor:
        return method(
            lambda u: torch.autograd.grad(twin, start, u, retain_graph=True)[0] + g,
            torch.zeros_like(g),
        )

    fz.register_hook(adjoint)
    return fz


def through_time(step: Callable[[Phi, Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    U, V, W = weights
    h = x.new_zeros(B, D)
    projected = x @ W.T
    for t in range(len(x)):
        c = h @ V.T + projected[t]
        h = step(lambda z, c=c: torch.tanh(z @ U.T + c), h.detach())
    return h


def training(
    step: Callable[[Phi, Tensor], Tensor], x: Tensor, weights: list[Tensor]
) -> Callable[[], None]:
    def run() -> None:
        for w in weights:
            w.grad = None
        through_time(step, x, *weights).sum().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    seconds = 3.0 if parser.parse_args().quick else 20.0
    print(platform.processor() or platform.machine(), f"torch {torch.__version__}, 1 thread")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    U, V = (a * torch.nn.init.orthogonal_(torch.empty(D, D)) for a in (0.7, 0.5))
    weights = [
        U.requires_grad_(),
        V.requires_grad_(),
        (0.3 * torch.randn(D, INPUTS)).requires_grad_(),
    ]
    x = torch.randn(T, B, INPUTS)
    forms = {"Picard": picard, "Anderson": anderson, "Broyden": broyden}
    runs, counts = {}, {}
    for name, make in SOLVERS.items():
        layer, method = FixedPoint(make()), forms[name]

        def ours(phi: Phi, z: Tensor, layer: FixedPoint = layer) -> Tensor:
            return layer(phi, z).z

        def hand(phi: Phi, z: Tensor, method: Callable = method) -> Tensor:
            return by_hand(method, phi, z)

        for kind, step in (("ours", ours), ("by hand", hand)):
            runs[f"{name}, {kind}"] = training(step, x, weights)
            runs[f"{name}, {kind}, forward"] = torch.no_grad()(
                lambda step=step: through_time(step, x, *weights)
            )
        counts[name] = layer(lambda z: torch.tanh(z @ U.T + x[0] @ weights[2].T), x.new_zeros(B, D))
    best = minima(runs, seconds)
    print(f"\n(B, T, D) = {(B, T, D)}; ms, forward and backward; forward alone")
    for name in SOLVERS:
        for part in ("", ", forward"):
            ours_, hand_ = (best[f"{name}, {kind}{part}"] for kind in ("ours", "by hand"))
            label = f"{name}{part}"
            print(f"  {label:20}{ours_ * 1e3:8.2f}{hand_ * 1e3:8.2f}{ours_ / hand_:7.2f} x by hand")
        print(f"    {counts[name].evaluations} evaluations in the first time step")


if __name__ == "__main__":
    main()
