"""Time the fused recurrences against torch's recurrent layers, plain loops and their products.

Minima of interleaved runs in one process, on one and two threads: ratios hold where times drift.
On a GPU against cuDNN.
Run: python benchmarks/recurrent.py [--quick] [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import environment
import torch
from figures import Figures, add_options
from processor import processor
from torch import Tensor, nn

from fixpoint.models import (
    GRU,
    LSTM,
    RNN,
    fused_scan,
    gated_scan,
    gated_scan_reference,
    scan_reference,
)

# B, T, d, n
SHAPES = {
    "HAR-2": (128, 128, 9, 80),
    "DSA-19": (128, 125, 45, 64),
    "Google": (128, 99, 32, 100),
    "Pixel-MNIST": (128, 784, 1, 128),
}
# On the GPU alone: a full device, and A that does not fit into a multiprocessor in float32.
LARGE = {"wide batch": (2048, 128, 9, 80), "n = 256": (128, 128, 32, 256)}
Run = Callable[[], object]
Layer = tuple[Callable[[Tensor], Tensor], list[Tensor]]  # forward and its parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    add_options(parser)
    options = parser.parse_args()
    figures = Figures(options.json)
    if options.device == "cuda":
        gpu(quick=options.quick, figures=figures)
    else:
        cpu(2.0 if options.quick else 20.0, figures)


def cpu(seconds: float, figures: Figures) -> None:
    names = "torch", "numpy", "scipy", "numba"
    print(processor(), *(f"{x} {_version(x)}" for x in names))
    print("OpenBLAS runs", environment.blas_kernel())
    one_thread: dict[str, tuple[float, float]] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, shape in SHAPES.items():
            print(f"\n{name} (B, T, d, n) = {shape}, {torch.get_num_threads()} threads; ms")
            best = minima(runs(*shape), seconds)
            table(best)
            figures.add(shape=name, threads=threads, ms=as_ms(best))
            for cell in ("FastGRNN", "UGRNN"):
                pairs = ((best[f"{cell}{x}"], best[f"{cell} plain{x}"]) for x in ("", " inference"))
                print(f"  {cell} against its plain loop:", *(f"{a / b:.2f}x" for a, b in pairs))
            for kind in ("RNN", "GRU", "LSTM"):
                pairs = ((best[f"{kind}{x}"], best[f"nn.{kind}{x}"]) for x in ("", " inference"))
                print(f"  {kind} against torch's:", *(f"{a / b:.2f}x" for a, b in pairs))
            fraction = best_rate_fraction(shape, best)
            print(f"  fused training runs at {100 * fraction:.0f} % of the processor's best rate")
            ours = best["fused"], best["fused inference"]
            if threads == 1:
                one_thread[name] = ours
            else:
                gain = [x / y for x, y in zip(one_thread[name], ours, strict=True)]
                print(f"2 threads against 1: training {gain[0]:.2f}x, inference {gain[1]:.2f}x")
    torch.set_num_threads(1)
    print("\nHAR-2, 1 thread: ms for T K inner steps, and us for each")
    linear: dict[str, Run] = {}
    steps = {
        f"T = {T}, K = {K}": (T, K) for T, K in ((64, 1), (128, 1), (256, 1), (128, 2), (128, 4))
    }
    for name, (T, K) in steps.items():
        linear[name] = training(*ours_layer(T, 128, 9, 80, K), torch.randn(T, 128, 9), 80)
    for name, best_time in minima(linear, seconds).items():
        T, K = steps[name]
        print(f"  {name:20}{best_time * 1e3:8.2f}{best_time / (T * K) * 1e6:8.1f}")


def gpu(*, quick: bool, figures: Figures) -> None:
    """cuDNN runs float32 in TF32 unless told not to; the fused recurrence itself never does."""
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}", end=", ")
    print(f"triton {_version('triton')}, cuDNN {torch.backends.cudnn.version()}")
    kinds = {
        "float32": (torch.float32, False),
        "TF32": (torch.float32, True),
        "bfloat16": (torch.bfloat16, False),
    }
    names = ["HAR-2", "wide batch", "n = 256"] if quick else [*SHAPES, *LARGE]
    for name in names:
        shape = (SHAPES | LARGE)[name]
        for kind, (dtype, tf32) in kinds.items():
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.set_default_dtype(dtype)
            print(f"\n{name} (B, T, d, n) = {shape}, {kind}; ms")
            with torch.device("cuda"):
                on_gpu = runs(*shape, gated=False)  # which has no kernel for a GPU
            best = minima(on_gpu, 1.0 if quick else 20.0, elapsed_on_gpu)
            table(best)
            figures.add(shape=name, kind=kind, ms=as_ms(best))
    torch.set_default_dtype(torch.float32)


def runs(B: int, T: int, d: int, n: int, *, gated: bool = True) -> dict[str, Run]:
    x = torch.randn(T, B, d)
    layers: dict[str, Layer] = {
        "fused": ours_layer(T, B, d, n),
        "fused, last state": ours_layer(T, B, d, n, last_only=True),
        "fused, recompute": ours_layer(T, B, d, n, recompute=True),
        "plain loop": ours_layer(T, B, d, n, plain=True),
        "nn.RNN": torch_layer(nn.RNN(d, n, nonlinearity="relu")),
        "nn.GRU": torch_layer(nn.GRU(d, n)),
        "nn.LSTM": torch_layer(nn.LSTM(d, n)),
        "RNN": torch_layer(RNN(d, n, nonlinearity="relu")),
        "GRU": torch_layer(GRU(d, n)),
        "LSTM": torch_layer(LSTM(d, n)),
    }
    if gated:
        for name, count in (("FastGRNN", 1), ("UGRNN", 2)):
            layers[name] = gated_layer(T, B, d, n, count)
            layers[f"{name} plain"] = gated_layer(T, B, d, n, count, plain=True)
    out: dict[str, Run] = {}
    for name, layer in layers.items():
        out[name] = training(*layer, x, n)
        out[f"{name} inference"] = inference(layer[0], x)
    out["floor"] = products(3 * T, B, n)
    out["1024^3"] = large_product()
    return out


def large_product() -> Run:
    """One product that reaches the best rate of the processor."""
    a, b, out = torch.randn(3, 1024, 1024)
    return lambda: torch.mm(a, b, out=out)


def best_rate_fraction(shape: tuple[int, int, int, int], best: dict[str, float]) -> float:
    """The products of training, with the state and with x, at the rate of a large product."""
    B, T, d, n = shape
    work = 3 * T * B * n * n + 2 * T * B * n * d  # no gradient of x is asked for
    return work / best["fused"] / (1024**3 / best["1024^3"])


def ours_layer(
    T: int, B: int, d: int, n: int, K: int = 1, *, plain: bool = False, **options: bool
) -> Layer:
    """ERNN with eta (T, K), bare; eta in float32 always."""
    W = torch.randn(n, d).mul_(0.1).requires_grad_()
    A = torch.randn(n, n).mul_(0.1).requires_grad_()
    bias = torch.zeros(n, requires_grad=True)
    eta = torch.full((T, K), 0.01, dtype=torch.float32, requires_grad=True)
    h0 = torch.zeros(B, n)

    def forward(x: Tensor) -> Tensor:
        scan = scan_reference if plain else fused_scan
        return scan(x, A, 1 - eta, eta, h0, activation="relu", W=W, bias=bias, **options)

    return forward, [W, A, bias, eta]


def gated_layer(T: int, B: int, d: int, n: int, products: int, *, plain: bool = False) -> Layer:
    """FastGRNN with one product, UGRNN with two, bare."""
    W = torch.randn(products * n, d).mul_(0.1).requires_grad_()
    V = torch.randn(products * n, n).mul_(0.1).requires_grad_()
    bias = torch.zeros(2 * n, requires_grad=True)
    p, q = (torch.tensor(v, requires_grad=True) for v in (0.73, 0.018))
    h0 = torch.zeros(B, n)

    def forward(x: Tensor) -> Tensor:
        scan = gated_scan_reference if plain else gated_scan
        return scan(x, V, p, q, h0, activation="tanh", W=W, bias=bias)

    return forward, [W, V, bias, p, q]


def torch_layer(layer: nn.Module) -> Layer:
    return (lambda x: layer(x)[0]), list(layer.parameters())


def training(
    forward: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, n: int
) -> Run:
    gradient = torch.randn(*x.shape[:2], n)

    def run() -> None:
        y = forward(x)
        torch.autograd.grad(y, parameters, gradient if y.dim() == 3 else gradient[0])

    return run


def inference(forward: Callable[[Tensor], Tensor], x: Tensor) -> Run:
    return torch.no_grad()(lambda: forward(x))


def products(count: int, B: int, n: int) -> Run:
    """Products of the recurrence's own size into one buffer."""
    h, A, out = torch.randn(B, n), torch.randn(n, n), torch.empty(B, n)

    def run() -> None:
        for _ in range(count):
            torch.mm(h, A, out=out)

    return run


def elapsed(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def elapsed_on_gpu(run: Run, repeats: int = 3) -> float:
    """Seconds of one of several runs in a row, as in training: launches overlap with kernels."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def minima(
    runs: dict[str, Run], seconds: float, elapsed: Callable[[Run], float] = elapsed
) -> dict[str, float]:
    """The shortest time of each run in seconds, over interleaved rounds (at least three)."""
    best = dict.fromkeys(runs, float("inf"))
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < seconds:
        for name, run in runs.items():
            best[name] = min(best[name], elapsed(run))
        rounds += 1
    return best


def as_ms(best: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * seconds, 4) for name, seconds in best.items()}


def table(best: dict[str, float]) -> None:
    """Times, and of each row the part that `fused` takes."""
    floor, fused, fused_inference = best["floor"], best["fused"], best["fused inference"]
    print(f"  {'':20}{'training':>9}{'fused is':>10}{'inference':>11}{'fused is':>10}")
    for name in (x for x in best if f"{x} inference" in best):
        times = best[name], best[f"{name} inference"]
        ratios = fused / times[0], fused_inference / times[1]
        print(
            f"  {name:20}{times[0] * 1e3:9.2f}{ratios[0]:9.2f}x"
            f"{times[1] * 1e3:11.2f}{ratios[1]:9.2f}x"
        )
    print(
        f"  {'floor (3 T, T)':20}{floor * 1e3:9.2f}{fused / floor:9.2f}x"
        f"{floor / 3 * 1e3:11.2f}{3 * fused_inference / floor:9.2f}x"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    main()
