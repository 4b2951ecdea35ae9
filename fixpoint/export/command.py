"""`fixpoint export`: a trained network as a program for another machine."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from fixpoint.export.agreement import Agreement, compare, torch_scores
from fixpoint.export.c.compiler import compiled_scores, find_compiler
from fixpoint.export.c.names import constant_names
from fixpoint.export.c.writer import constants, write_c
from fixpoint.export.fixed_point import FixedNetwork, to_fixed_point
from fixpoint.export.network import Network, check_finished, raw_data, read_network
from fixpoint.training import Trained, load_trained
from fixpoint.training.commands.console import say

BITS = (32, 16, 8)
CALIBRATION_WINDOWS = 2048


def export_c(
    console: Console,
    path: Path,
    *,
    out: Path | None = None,
    bits: int = 32,
    fold: bool = True,
    data: str | None = None,
) -> Agreement | None:
    """Write a C program and print its sizes, its rounding errors and its agreement with torch.

    Args:
        path: the folder of a finished run, or a checkpoint in it.
        out: folder of the files; `c` in that of the run if not given.
        bits: of the weights; 32 is float, 16 and 8 are fixed point.
        fold: see `read_network`.
        data: where the data of the run are now, if they were moved.

    Returns:
        The agreement on the test windows; None for float where there is no C compiler.

    Raises:
        ValueError: the run cannot be exported.
        OSError: a file is missing, or cannot be written.
    """
    if bits not in BITS:
        raise ValueError(f"--bits must be 32, 16 or 8; got {bits}")
    check_finished(path.expanduser())
    run = load_trained(path, data=data)
    network = make_network(run, bits=bits, fold=fold)
    title = f"{run.recipe.label} of {run.recipe.data.dataset}, {bits} bits"
    folder = out or run.folder / "c"
    files = write_c(network, folder, title=title)
    say(console, f"{title}: {', '.join(map(str, files))}")
    for line in description(network):
        say(console, line)
    agreement, how = measure(run, network, folder)
    if agreement is None:
        say(console, "No C compiler was found: the program was not compared with torch.")
    else:
        say(console, f"Test windows, {how}: {agreement}")
    return agreement


def make_network(run: Trained, *, bits: int, fold: bool) -> Network | FixedNetwork:
    """The network of a run in float32 or fixed point."""
    network = read_network(run, fold=fold)
    if bits == 32:
        return network
    data = raw_data(run)
    step = max(1, len(data.x_train) // CALIBRATION_WINDOWS)
    return to_fixed_point(network, data.x_train[::step], bits=bits)


def measure(
    run: Trained, network: Network | FixedNetwork, folder: Path
) -> tuple[Agreement | None, str]:
    """Compare the program in a folder with torch on the test windows, and say how it was run."""
    data = raw_data(run)
    compiler = find_compiler()
    if compiler is not None:
        scores, how = compiled_scores(folder, data.x_test, compiler), f"compiled by {compiler}"
    elif isinstance(network, FixedNetwork):
        scores = torch.cat([network.scores(part) for part in data.x_test.split(512)])
        how = "by the same integer arithmetic in NumPy"
    else:
        return None, ""
    return compare(scores, torch_scores(run), data.y_test), how


def description(network: Network | FixedNetwork) -> list[str]:
    """Sizes, scales and bounds of errors, a line each."""
    source = network.network if isinstance(network, FixedNetwork) else network
    sizes = {array.name: array.bytes for array in constants(network)}
    other = ("scale", "shift", "scale_unit", "shift_unit", "tanh_nodes", "log_nodes")
    normalization = sum(size for name, size in sizes.items() if name in other)
    weights = sum(sizes.values()) - normalization
    lines = [
        f"Weights {weights / 1024:.1f} KB, normalization and tables {normalization / 1024:.1f} KB, "
        f"state {4 * source.hidden_size + 8} bytes, {source.multiplications} multiplications a "
        "step."
    ]
    names = constant_names(source.classes)
    lines.append(
        "Classes: " + ", ".join(f"{n} = {c!r}" for n, c in zip(names, source.classes, strict=True))
    )
    return lines + (_errors(network) if isinstance(network, FixedNetwork) else [])


def _errors(network: FixedNetwork) -> list[str]:
    lines = [
        f"{name}: {matrix.integers.shape[0]} x {matrix.integers.shape[1]}, scale "
        f"{matrix.scale:.3g}, rounding error of an entry at most {matrix.bound:.2g}, "
        f"{100 * matrix.clipped:.2g} % clipped; changes the product by {100 * matrix.error:.2g} %."
        for name, matrix in network.matrices.items()
    ]
    values = ", ".join(f"{name} {scale / 2:.2g}" for name, scale in network.scales.items())
    lines.append(f"16 bit values are rounded by at most: {values}.")
    lines += [f"{name}: error at most {bound:.2g}." for name, bound in network.function_bounds]
    return lines
