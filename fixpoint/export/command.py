"""`fixpoint export`: a trained network as a program for another machine."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from fixpoint.export.agreement import Agreement, compare, torch_scores
from fixpoint.export.c.compiler import compiled_scores, find_compiler
from fixpoint.export.c.names import constant_names
from fixpoint.export.c.writer import PREFIX, constants, write_c
from fixpoint.export.integer_input import Samples
from fixpoint.export.integer_network import IntegerNetwork, to_integers
from fixpoint.export.network import Network, check_finished, read_network, sensor_windows
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
    samples: Samples = "float",
    fold: bool = True,
    prefix: str = PREFIX,
    data: str | None = None,
) -> Agreement | None:
    """Write a C program and print its sizes, its rounding errors and its agreement with torch.

    Args:
        path: the folder of a finished run, or a checkpoint in it.
        out: folder of the files; `c` in that of the run if not given.
        bits: of the weights; 32 is float, 16 and 8 are fixed point.
        samples: type of the samples on the device.
        fold: see `read_network`.
        prefix: see `write_c`.
        data: where the data of the run are now, if they were moved.

    Returns:
        The agreement on the test windows; None for float where there is no C compiler, or where
        the data are gone.

    Raises:
        ValueError: the run cannot be exported, or no window has a score on the device.
        OSError: a file is missing, or cannot be written.
    """
    if bits not in BITS:
        raise ValueError(f"--bits must be 32, 16 or 8; got {bits}")
    if samples not in ("float", "int16"):
        raise ValueError(f"--input must be float or int16; got {samples!r}")
    if samples == "int16" and bits == 32:
        raise ValueError("--input int16 is for fixed point: give --bits 16 or 8 too")
    check_finished(path.expanduser())
    run = load_trained(path, data=data)
    network = make_network(run, bits=bits, fold=fold, samples=samples)
    title = f"{run.recipe.label} of {run.form.name}, {bits} bits"
    folder = out or run.folder / "c"
    files = write_c(network, folder, title=title, prefix=prefix)
    say(console, f"{title}: {', '.join(map(str, files))}")
    for line in description(network, prefix):
        say(console, line)
    try:
        agreement, how = measure(run, network, folder)
    except (ValueError, FileNotFoundError) as error:
        say(console, f"The program was not compared with torch: {error}")
        return None
    if agreement is None:
        say(console, "No C compiler was found: the program was not compared with torch.")
        return None
    say(console, f"Test windows, {how}: {agreement}")
    if not agreement.scored:
        raise ValueError(
            "no test window has a finite score on the device, so the program makes no sense: look "
            "at the units of the data and train again"
        )
    return agreement


def make_network(
    run: Trained, *, bits: int, fold: bool, samples: Samples = "float"
) -> Network | IntegerNetwork:
    """Return the network of a run in float32 or fixed point."""
    network = read_network(run, fold=fold)
    if bits == 32:
        return network
    windows = sensor_windows(run.raw, "train")
    step = max(1, len(windows) // CALIBRATION_WINDOWS)
    return to_integers(network, windows[::step], bits=bits, samples=samples)


def measure(
    run: Trained, network: Network | IntegerNetwork, folder: Path
) -> tuple[Agreement | None, str]:
    """Compare the program in a folder with torch on the test windows, and say how it was run."""
    windows = sensor_windows(run.raw, "test")
    compiler = find_compiler()
    if compiler is not None:
        samples = network.inputs.samples if isinstance(network, IntegerNetwork) else "float"
        scores = compiled_scores(folder, windows, compiler, samples=samples)
        how = f"compiled by {compiler}"
    elif isinstance(network, IntegerNetwork):
        scores = torch.cat([network.scores(part) for part in windows.split(512)])
        how = "by the same integer arithmetic in NumPy"
    else:
        return None, ""
    return compare(scores, torch_scores(run), run.raw.y_test), how


def description(network: Network | IntegerNetwork, prefix: str = PREFIX) -> list[str]:
    """Return sizes, scales and bounds of errors, a line each."""
    source = network.network if isinstance(network, IntegerNetwork) else network
    arrays = constants(network)
    tables = sum(array.bytes for array in arrays if array.is_table)
    weights = sum(array.bytes for array in arrays) - tables
    lines = [
        f"Weights {weights / 1024:.1f} KB, normalization and tables {tables / 1024:.1f} KB, "
        f"state {4 * source.state_size + 8} bytes, {source.multiplications} multiplications a "
        "step."
    ]
    names = constant_names(source.classes, prefix)
    lines.append(
        "Classes: " + ", ".join(f"{n} = {c!r}" for n, c in zip(names, source.classes, strict=True))
    )
    return lines + (_errors(network) if isinstance(network, IntegerNetwork) else [])


def _errors(network: IntegerNetwork) -> list[str]:
    lines = [
        f"{name}: {matrix.integers.shape[0]} x {matrix.integers.shape[1]}, scale "
        f"{matrix.scale:.3g}, rounding error of an entry at most {matrix.bound:.2g}, "
        f"{100 * matrix.clipped:.2g} % clipped; changes the product by {100 * matrix.error:.2g} %."
        for name, matrix in network.matrices.items()
    ]
    lines.append(
        f"Samples: normalized and rounded, they are off by at most {network.inputs.bound:.2g} "
        f"(in {'asinh of ' if network.inputs.inputs.asinh else ''}standard deviations)."
    )
    values = ", ".join(f"{name} {bound:.2g}" for name, bound in network.rounding.items())
    lines.append(f"16 bit values are rounded by at most: {values}.")
    lines += [f"{name}: error at most {bound:.2g}." for name, bound in network.function_bounds]
    return lines
