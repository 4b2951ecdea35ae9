"""The parts of `gpu_check` that need torch, numpy and triton alone: a line of JSON for each result.

    python scripts/gpu_parts.py kernels | few | layers | speed | solvers | graph [--rehearse]

kernels: versions first, then each kernel once against a loop in float64: error, registers, spills.
    Each in a process of its own, and so each layer: one that fails on the device, or hangs, spoils
    no other.
layers: output and gradients of each layer against the reference on the CPU in float64, of inputs
    that are not contiguous, on another stream, on a second device, and in half precision; memory.
few: a few of the kernels in this process, for a sanitizer.
speed: a training step of each layer, eager and as a CUDA graph, compared with torch's layers.
solvers: milliseconds and waits of a solve, and those of factorizations that solvers may call.
graph: a solve and its gradient as one graph of torch.compile, and as a CUDA graph: time, and error
    of each gradient.
A part whose device is lost continues in a new process, after the task that lost it.
--rehearse: the same at tiny sizes on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
Task = tuple[Callable[..., "dict[str, Any]"], "dict[str, Any]"]
WORKERS, PATIENCE = 12, 60
"""Processes at a time, and seconds that each has."""
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


def equilibrium(n: int, memory: int) -> dict[str, Any]:
    """The largest difference of a state from phi there, in float64, and how the solves ended."""
    from fixpoint.models.ops.equilibrium import triton_kernels as kernels
    from fixpoint.models.ops.equilibrium.arguments import ForwardArguments, IterationSettings
    from fixpoint.models.ops.equilibrium.results import new_report

    random = torch.Generator().manual_seed(0)
    T, B = 3, 2 if REHEARSE else 200
    x, U, V = (torch.randn(s, generator=random).to(DEVICE) for s in ((T, B, 4), (n, n), (n, n)))
    W, U = torch.randn(n, 4, generator=random).to(DEVICE), 0.3 * U / n**0.5
    S = torch.zeros(T + 1, B, n, device=DEVICE)
    report, C = new_report(T, S[0]), torch.empty(T, B, n, device=DEVICE)
    steps = torch.ones(1, 50, device=DEVICE)
    iteration = IterationSettings(steps, memory, 1e-5, 0.0, undamped=memory == 0)
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


def kernels() -> list[Task]:
    sizes = [(7, "float32")] if REHEARSE else [(33, "float32"), (80, "float32"), (128, "float32")]
    sizes += [] if REHEARSE else [(256, "float32"), (80, "bfloat16"), (256, "bfloat16")]
    tasks: list[Task] = [
        (recurrence, {"kind": k, "n": n, "dtype": d}) for k in KINDS for n, d in sizes
    ]
    return tasks + [
        (equilibrium, {"n": n, "memory": memory})
        for n in ((7,) if REHEARSE else (33, 80, 128))
        for memory in (0, 5)
    ]


def few() -> list[Task]:
    found = [("leaky", 33), ("UGRNN", 33), ("leaky", 256)]
    tasks: list[Task] = [
        (recurrence, {"kind": kind, "n": n, "dtype": "float32"}) for kind, n in found
    ]
    return [*tasks, (equilibrium, {"n": 33, "memory": 0})]


def fused_layers() -> dict[str, Callable[..., nn.Module]]:
    from fixpoint import Anderson, Implicit, Picard
    from fixpoint.models import ERNN, UGRNN, FastGRNN, FastRNN

    def equilibrium(solver: Any, **options: Any) -> nn.Module:
        backward = Implicit(on_failure="ignore")
        return ERNN(9, 80, map="self-feedback", solver=solver, backward=backward, **options)

    return {
        "ERNN": lambda **o: ERNN(9, 80, rank=2, **o),
        "ERNN, eta of each step": lambda **o: ERNN(9, 80, timesteps=6, max_iter=2, **o),
        "FastRNN": lambda **o: FastRNN(9, 80, **o),
        "FastGRNN": lambda **o: FastGRNN(9, 80, **o),
        "UGRNN": lambda **o: UGRNN(9, 80, num_layers=2, bidirectional=True, **o),
        "Picard": lambda **o: equilibrium(Picard(rtol=1e-5), **o),
        "Picard, damped": lambda **o: equilibrium(Picard(rtol=1e-5, beta=0.8), **o),
        "Anderson": lambda **o: equilibrium(Anderson(rtol=1e-5), **o),
    }


WAYS = ("plain", "transposed", "strided", "stream", "second device", "float16", "bfloat16")


def layer_like_reference(layer: str, way: str) -> dict[str, Any]:
    """The largest errors of output and gradients, relative to the largest value, and memory."""
    T, B = 6, 5
    torch.manual_seed(0)
    make = fused_layers()[layer]
    reference = make(implementation="reference").double()
    wide = torch.randn(B, T, 18, dtype=torch.float64)
    x = wide[..., ::2].transpose(0, 1)
    module = make()
    module.load_state_dict(reference.state_dict())
    device = torch.device(DEVICE)
    if way == "second device":
        if REHEARSE or torch.cuda.device_count() < 2:
            return {"skipped": "one device"}
        device = torch.device("cuda", 1)
    module = module.to(device)
    given = x.float().to(device) if way != "strided" else wide.float().to(device)[..., ::2]
    given = given.transpose(0, 1) if way == "strided" else given
    given = given.transpose(0, 1).contiguous().transpose(0, 1) if way == "transposed" else given
    given = given.contiguous() if way not in ("strided", "transposed") else given
    expected = _with_gradients(reference, x, None)
    if not REHEARSE:
        torch.cuda.reset_peak_memory_stats(device)
    if way == "stream" and not REHEARSE:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = _with_gradients(module, given, None)
        torch.cuda.current_stream().wait_stream(side)
    else:
        lowered = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(way)
        found = _with_gradients(module, given, lowered)
    errors = [_error(a.double().cpu(), e) for a, e in zip(found, expected, strict=True)]
    memory = {} if REHEARSE else {"MB": torch.cuda.max_memory_allocated(device) / 1e6}
    return {"error_of_output": errors[0], "error_of_gradients": max(errors[1:]), **memory}


def _with_gradients(module: nn.Module, x: Tensor, lowered: torch.dtype | None) -> list[Tensor]:
    with torch.autocast(x.device.type, dtype=lowered, enabled=lowered is not None):
        output = module(x)[0]
    weights = torch.linspace(-1, 1, output.numel(), device=x.device).view(output.shape)
    gradients = torch.autograd.grad((output * weights).sum(), list(module.parameters()))
    return [output.detach(), *gradients]


def _error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def layers() -> list[Task]:
    ways = ("plain", "strided", "second device") if REHEARSE else WAYS
    names = list(fused_layers())
    return [(layer_like_reference, {"layer": n, "way": w}) for n in names for w in ways]


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


def timed_layers(d: int, n: int) -> dict[str, Callable[[], nn.Module]]:
    from fixpoint.models import ERNN, UGRNN, FastGRNN, FastRNN

    ours = {"ERNN": ERNN, "FastRNN": FastRNN, "FastGRNN": FastGRNN, "UGRNN": UGRNN}
    theirs = {"nn.RNN": nn.RNN, "nn.GRU": nn.GRU, "nn.LSTM": nn.LSTM}
    return {name: functools.partial(kind, d, n) for name, kind in (ours | theirs).items()}


def training_step(layer: str, shape: str, precision: str) -> dict[str, Any]:
    T, B, d, n = (3, 2, 3, 5) if REHEARSE else SHAPES[shape]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "TF32"
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    head = Head(timed_layers(d, n)[layer]()).to(DEVICE, dtype)
    x = torch.randn(T, B, d, device=DEVICE, dtype=dtype)

    def step(module: nn.Module) -> None:
        module(x).backward()

    found = {"eager_ms": milliseconds(lambda: step(head))}
    if not REHEARSE:
        graphed = torch.cuda.make_graphed_callables(head, (x,))
        found["captured_ms"] = milliseconds(lambda: step(graphed))
    return found


def speed() -> list[Task]:
    shapes = list(SHAPES)[:1] if REHEARSE else list(SHAPES)
    return [
        (training_step, {"layer": layer, "shape": shape, "precision": precision})
        for shape in shapes
        for precision in (["float32"] if REHEARSE else ["float32", "TF32", "bfloat16"])
        for layer in timed_layers(1, 1)
        if precision != "TF32" or layer.startswith("nn.")
    ]


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
        waits = waits_of(lambda: solve(lambda z: torch.tanh(z @ U.mT + x), z0, made))
        ms = milliseconds(lambda: solve(lambda z: torch.tanh(z @ U.mT + x), z0, made))
    return {"ms": ms, "waits": waits, "updates": int(found.iterations.max())}


def waits_of(call: Callable[[], Any]) -> int | None:
    """How often the host waits for the device."""
    if REHEARSE:
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in told)


def factorization(name: str, B: int) -> dict[str, Any]:
    A = torch.randn(B, 8, 5, device=DEVICE)
    square = A.mT @ A + torch.eye(5, device=DEVICE)
    calls = {
        "qr": lambda: torch.linalg.qr(A),
        "svdvals": lambda: torch.linalg.svdvals(A),
        "cholesky_ex": lambda: torch.linalg.cholesky_ex(square),
    }
    return {"ms": milliseconds(calls[name])}


def solvers() -> list[Task]:
    tasks: list[Task] = [
        (solve_time, {"solver": solver, "check_every": check_every})
        for solver in ("picard", "anderson", "broyden", "auto", "newton", "newton-krylov")
        for check_every in (1, 4)
    ]
    return tasks + [
        (factorization, {"name": name, "B": B})
        for name in ("qr", "svdvals", "cholesky_ex")
        for B in ((2,) if REHEARSE else (32, 256, 1024))
    ]


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


class Deq(nn.Module):
    """A fixed number of updates of a tanh layer."""

    def __init__(self, solver: str, D: int) -> None:
        from fixpoint import FixedPoint, Unrolled
        from fixpoint.solvers import SOLVERS

        super().__init__()
        self.U = nn.Parameter(0.5 * torch.randn(D, D, device=DEVICE) / D**0.5)
        made = SOLVERS[solver](max_iter=8, rtol=0, atol=0)
        self.fixed_point = FixedPoint(made, Unrolled(), on_failure="ignore")

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed_point(lambda z: torch.tanh(z @ self.U.mT + x), torch.zeros_like(x)).z


def captured(solver: str) -> dict[str, Any]:
    B, D = (2, 3) if REHEARSE else (128, 128)
    deq, x = Deq(solver, D), torch.randn(B, D, device=DEVICE)

    def both(module: Callable[[Tensor], Tensor]) -> list[Tensor]:
        z = module(x)
        return [z.detach().clone(), *torch.autograd.grad(z.square().sum(), [deq.U])]

    expected = both(deq)
    fast: Any = copy.copy(deq) if REHEARSE else torch.cuda.make_graphed_callables(deq, (x,))
    pairs = list(zip(both(fast), expected, strict=True))
    return {
        "errors": [float((a - b).abs().max() / b.abs().max()) for a, b in pairs],
        "captured_ms": milliseconds(lambda: both(fast)),
    }


def graph() -> list[Task]:
    tasks: list[Task] = [
        (captured, {"solver": solver}) for solver in ("picard", "anderson", "broyden")
    ]
    return tasks + [
        (solve_in_graph, {"solver": solver, "check_every": check_every})
        for solver in ("picard", "anderson")
        for check_every in (1, 5)
    ]


def in_processes(part: str, tasks: list[Task], *, at_a_time: int) -> None:
    """Do some of the tasks after one another in each of several processes, which report them."""

    def run(numbers: range) -> str | None:
        command = [sys.executable, __file__, part, "--only", *map(str, numbers)]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return f"not done in {PATIENCE} s"
        return f"exit {done.returncode}: {done.stderr[-300:]}" if done.returncode else None

    groups = [range(i, min(i + at_a_time, len(tasks))) for i in range(0, len(tasks), at_a_time)]
    with ThreadPoolExecutor(WORKERS) as pool:
        for numbers, end in zip(groups, pool.map(run, groups), strict=True):
            if end is not None:
                report(tasks=[tasks[number][1] for number in numbers], error=end)


def is_lost() -> bool:
    """Tell whether the device serves this process no more, after an error on it."""
    if REHEARSE:
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"kernels": kernels, "few": few, "layers": layers, "speed": speed}
    parts |= {"solvers": solvers, "graph": graph}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the tasks to do")
    parser.add_argument("--skip", type=int, default=0, help="tasks that are done")
    options = parser.parse_args()
    if options.part == "kernels" and options.only is None and not options.skip:
        report(versions=versions())
    tasks = parts[options.part]()
    at_a_time = {"kernels": 1, "layers": len(WAYS)}.get(options.part)
    if at_a_time and options.only is None and not REHEARSE:
        in_processes(options.part, tasks, at_a_time=at_a_time)
        return
    for number, (part, given) in enumerate(tasks):
        if number < options.skip or (options.only is not None and number not in options.only):
            continue
        report(**guarded(part, **given))
        if options.only is None and is_lost():
            again = [__file__, options.part, "--skip", str(number + 1)]
            os.execv(sys.executable, [sys.executable, *again])


if __name__ == "__main__":
    main()
