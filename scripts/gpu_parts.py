"""The parts of `gpu_check` that need torch, numpy and triton alone: a line of JSON for each result.

    python scripts/gpu_parts.py kernels | few | speed | solvers | graph [--rehearse]

kernels: versions first, then each kernel once against a loop in float64: error, registers, spills.
few: a few of the kernels in this process, for a sanitizer.
speed: a training step of each layer, eager and as a CUDA graph, compared with torch's layers.
solvers: milliseconds a solve, and those of the factorizations that solvers may call.
graph: a solve and its gradient as one graph of torch.compile: time, and error of each gradient.
--rehearse: the same at tiny sizes on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("FIXPOINT_DATA", "data")
REHEARSE = "--rehearse" in sys.argv
if REHEARSE:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

DEVICE = "cpu" if REHEARSE else "cuda"
WORKERS = 12
KINDS = {"leaky": 0, "FastGRNN": 1, "UGRNN": 2}
SHAPES = {"HAR-2": (128, 64, 9, 80), "Pixel-MNIST": (784, 128, 1, 128)}
SHAPES |= {"large batch": (128, 1024, 9, 80), "n = 256": (128, 128, 9, 256)}
"""T, B, d, n of training steps."""


def report(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def guarded(part: Callable[..., dict[str, Any]], **given: Any) -> dict[str, Any]:
    """What a part finds, or its error: one that fails does not end the others."""
    begin = time.monotonic()
    try:
        found = part(**given)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    return {**given, **found, "seconds": round(time.monotonic() - begin, 2)}


def versions() -> dict[str, Any]:
    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    found = {name: of(name) for name in ("torch", "triton", "numpy", "numba")}
    device = (
        {} if REHEARSE else {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    )
    return {"python": platform.python_version(), **found, **device}


def recurrence(kind: str, n: int, dtype: str) -> dict[str, Any]:
    """The largest error of states and gradients, relative to the largest value."""
    from fixpoint.models.ops.common import triton_recurrence as kernels

    code, T, B = KINDS[kind], 5, 3
    products, kept = max(1, code), 2 if code else 1
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = scale * torch.randn(shape, generator=random)
        return values.to(DEVICE, getattr(torch, dtype)).contiguous()

    u = tuple(draw(T, B, n) for _ in range(products))
    V = tuple(draw(n, n, scale=0.5 / n**0.5) for _ in range(products))
    w = torch.full((2, T), 0.5, device=DEVICE).unbind()
    bias, G = draw(2, n) if code else None, draw(T, B, n)
    h, nothing = draw(B, n), draw(0, B, n)
    S = torch.cat((h.unsqueeze(0), torch.empty_like(u[0])))
    saved, D = (tuple(torch.empty_like(u[0]) for _ in range(c)) for c in (kept, products))
    leaves = [v.double().requires_grad_() for v in (*u, *V)]
    exact = _loop(code, leaves[:products], leaves[products:], bias, h.double())
    expected = torch.autograd.grad((exact * G).sum(), leaves[:products])
    kernels.forward(kernels.Forward(code, "tanh", u, V, w, bias, 1, h, S, nothing, saved, 1))
    g = torch.zeros_like(h)
    kernels.backward(kernels.Backward(code, "tanh", G, V, w, 1, g, S, saved, D))
    pairs = [(S[1:], exact), *zip(D, expected, strict=True)]
    errors = [((a - e).abs().max() / e.abs().max()).item() for a, e in pairs]
    return {"error_of_states": errors[0], "error_of_gradients": max(errors[1:]), **usage(kernels)}


def _loop(code: int, u: list[Tensor], V: list[Tensor], bias: Any, h: Tensor) -> Tensor:
    states = []
    for t in range(len(u[0])):
        x = [input_projection[t] + h @ v.mT for input_projection, v in zip(u, V, strict=True)]
        if code:
            z, c = torch.sigmoid(x[0] + bias[0]), torch.tanh(x[-1] + bias[1])
            h = z * h + (0.5 * (1 - z) + 0.5) * c
        else:
            h = 0.5 * h + 0.5 * torch.tanh(x[0])
        states.append(h)
    return torch.stack(states)


def equilibrium(n: int, memory: int, rows: int) -> dict[str, Any]:
    """The largest difference of a state from phi there, in float64, and how the solves ended."""
    from fixpoint.models.ops.equilibrium import triton_kernels as kernels
    from fixpoint.models.ops.equilibrium.arguments import ForwardArguments, IterationSettings
    from fixpoint.models.ops.equilibrium.results import new_report

    random = torch.Generator().manual_seed(0)
    T, B = 3, rows * (1 if REHEARSE else 132)
    x, U, V = (torch.randn(s, generator=random).to(DEVICE) for s in ((T, B, 4), (n, n), (n, n)))
    W, U = torch.randn(n, 4, generator=random).to(DEVICE), 0.3 * U / n**0.5
    S = torch.zeros(T + 1, B, n, device=DEVICE)
    report, C = new_report(T, S[0]), torch.empty(T, B, n, device=DEVICE)
    steps = torch.ones(1, 50, device=DEVICE)
    iteration = IterationSettings(steps, memory, 1e-5, 0.0)
    kernels.forward(ForwardArguments(x, W, None, U, 0.1 * V, S, C, report, "tanh", iteration))
    z, before = S[1:].double(), S[:-1].double()
    inner = z @ U.double().mT + before @ (0.1 * V.double()).mT + x.double() @ W.double().mT
    codes = sorted(set(report.result.flatten().tolist()))
    error = (torch.tanh(inner) - z).abs().max().item()
    return {"error": error, "results": codes, **usage(kernels)}


def usage(kernels: Any) -> dict[str, Any]:
    """Registers and spills of the kernels that ran, as the driver loaded them."""
    found = {}
    for name in ("_forward", "_backward"):
        for cache in getattr(getattr(kernels, name), "device_caches", {}).values():
            for kernel in cache[0].values():
                found[name] = [kernel.n_regs, kernel.n_spills, kernel.metadata.shared]
    return found


def kernels() -> Iterator[dict[str, Any]]:
    yield {"versions": versions()}
    sizes = [(7, "float32")] if REHEARSE else [(33, "float32"), (80, "float32"), (128, "float32")]
    sizes += [] if REHEARSE else [(256, "float32"), (80, "bfloat16"), (256, "bfloat16")]
    tasks = [(recurrence, {"kind": k, "n": n, "dtype": d}) for k in KINDS for n, d in sizes]
    ways = [(0, 1)] if REHEARSE else [(0, 1), (0, 2), (0, 4), (5, 1)]
    tasks += [
        (equilibrium, {"n": n, "memory": m, "rows": rows})
        for n in ((7,) if REHEARSE else (33, 80, 128))
        for m, rows in ways
    ]
    if REHEARSE:
        yield from (guarded(part, **given) for part, given in tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        for future in as_completed([pool.submit(guarded, part, **given) for part, given in tasks]):
            yield future.result()


def few() -> Iterator[dict[str, Any]]:
    for kind, n in (("leaky", 33), ("UGRNN", 33), ("leaky", 256)):
        yield guarded(recurrence, kind=kind, n=n, dtype="float32")
    yield guarded(equilibrium, n=33, memory=0, rows=1)


def milliseconds(call: Callable[[], Any]) -> float:
    if REHEARSE:
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200))


class Head(nn.Module):
    """A layer with the sum of squares of its last state as its loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][-1].square().mean()


def layers(d: int, n: int) -> dict[str, Callable[[], nn.Module]]:
    from fixpoint.models import ERNN, UGRNN, FastGRNN, FastRNN

    ours = {"ERNN": ERNN, "FastRNN": FastRNN, "FastGRNN": FastGRNN, "UGRNN": UGRNN}
    theirs = {"nn.RNN": nn.RNN, "nn.GRU": nn.GRU, "nn.LSTM": nn.LSTM}
    return {name: functools.partial(kind, d, n) for name, kind in (ours | theirs).items()}


def training_step(layer: str, shape: str, precision: str) -> dict[str, Any]:
    T, B, d, n = (3, 2, 3, 5) if REHEARSE else SHAPES[shape]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "TF32"
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    head = Head(layers(d, n)[layer]()).to(DEVICE, dtype)
    x = torch.randn(T, B, d, device=DEVICE, dtype=dtype)

    def step(module: nn.Module) -> None:
        module(x).backward()

    found = {"eager_ms": milliseconds(lambda: step(head))}
    if not REHEARSE:
        graphed = torch.cuda.make_graphed_callables(head, (x,))
        found["captured_ms"] = milliseconds(lambda: step(graphed))
    return found


def speed() -> Iterator[dict[str, Any]]:
    shapes = list(SHAPES)[:1] if REHEARSE else list(SHAPES)
    for shape in shapes:
        for precision in ["float32"] if REHEARSE else ["float32", "TF32", "bfloat16"]:
            for layer in layers(1, 1):
                if precision != "TF32" or layer.startswith("nn."):
                    yield guarded(training_step, layer=layer, shape=shape, precision=precision)


def solve_time(solver: str, check_every: int) -> dict[str, Any]:
    from fixpoint import solve
    from fixpoint.solvers import SOLVERS

    B, D = (2, 3) if REHEARSE else (128, 128)
    U = torch.randn(D, D, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    U, x = 0.9 * U / torch.linalg.matrix_norm(U, 2), torch.ones(B, D, device=DEVICE)
    made = SOLVERS[solver](rtol=1e-4, check_every=check_every)
    z0 = torch.zeros_like(x)
    with torch.no_grad():
        found = solve(lambda z: torch.tanh(z @ U.mT + x), z0, made)
        ms = milliseconds(lambda: solve(lambda z: torch.tanh(z @ U.mT + x), z0, made))
    return {"ms": ms, "updates": int(found.iterations.max())}


def factorization(name: str, B: int) -> dict[str, Any]:
    A = torch.randn(B, 8, 5, device=DEVICE)
    square = A.mT @ A + torch.eye(5, device=DEVICE)
    calls = {
        "qr": lambda: torch.linalg.qr(A),
        "svdvals": lambda: torch.linalg.svdvals(A),
        "cholesky_ex": lambda: torch.linalg.cholesky_ex(square),
    }
    return {"ms": milliseconds(calls[name])}


def solvers() -> Iterator[dict[str, Any]]:
    for solver in ("picard", "anderson", "broyden", "auto", "newton"):
        for check_every in (1, 4):
            yield guarded(solve_time, solver=solver, check_every=check_every)
    for name in ("qr", "svdvals", "cholesky_ex"):
        for B in (2,) if REHEARSE else (32, 256, 1024):
            yield guarded(factorization, name=name, B=B)


def solve_in_graph(solver: str, check_every: int) -> dict[str, Any]:
    from fixpoint import FixedPoint, Implicit
    from fixpoint.solvers import SOLVERS

    B, D = (2, 3) if REHEARSE else (128, 128)
    U, x = (torch.randn(n, D, device=DEVICE) for n in (D, B))
    U = (0.9 * U / torch.linalg.matrix_norm(U, 2)).requires_grad_()
    x.requires_grad_()
    made = [SOLVERS[solver](rtol=1e-4, check_every=n) for n in (1, check_every)]
    plain, several = (FixedPoint(each, Implicit()) for each in made)

    def state(layer: nn.Module) -> Tensor:
        return layer(lambda z: torch.tanh(z @ U.t() + x), torch.zeros_like(x)).z

    def both(state: Callable[[nn.Module], Tensor], layer: nn.Module) -> list[Tensor]:
        z = state(layer)
        return [z.detach(), *torch.autograd.grad(z.square().sum(), [U, x])]

    torch._dynamo.reset()
    fast = torch.compile(state, fullgraph=True, backend="eager" if REHEARSE else "inductor")
    begin = time.monotonic()
    pairs = list(zip(both(fast, several), both(state, plain), strict=True))
    return {
        "compiling_s": round(time.monotonic() - begin, 1),
        "errors": [float((a - b).abs().max() / b.abs().max()) for a, b in pairs],
        "ms": milliseconds(lambda: both(state, plain)),
        "compiled_ms": milliseconds(lambda: both(fast, several)),
    }


def graph() -> Iterator[dict[str, Any]]:
    for solver in ("picard", "anderson"):
        for check_every in (1, 5):
            yield guarded(solve_in_graph, solver=solver, check_every=check_every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"kernels": kernels, "few": few, "speed": speed, "solvers": solvers, "graph": graph}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    for found in parts[parser.parse_args().part]():
        report(**found)


if __name__ == "__main__":
    main()
