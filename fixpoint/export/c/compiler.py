"""A C program compiled and run on windows, where this machine has a C compiler."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fixpoint.export.integer_input import Samples

FLAGS = ("-std=c99", "-O2")
COMPILERS = ("cc", "gcc", "clang")


def find_compiler() -> str | None:
    """Return the name of a C compiler that is installed."""
    return next((name for name in COMPILERS if shutil.which(name)), None)


def compile_c(folder: Path, program: Path, compiler: str, *, flags: Sequence[str] = FLAGS) -> None:
    """Compile the C files of a folder into a program.

    Raises:
        RuntimeError: the compiler fails, with what it prints.
    """
    sources = sorted(map(str, folder.glob("*.c")))
    command = [compiler, *flags, *sources, "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()}")


def run_c(
    command: Sequence[str], windows: Tensor, *, samples: Samples = "float"
) -> tuple[Tensor, Tensor]:
    """Return labels (B,) and scores (B, C) that a compiled program prints for windows (B, T, d).

    Args:
        command: the program, with an emulator before it where it is for another machine.
        samples: type of the samples that it takes.

    Raises:
        RuntimeError: the program fails, with what it prints.
    """
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "windows.bin"
        kind = np.int16 if samples == "int16" else np.float32
        windows.contiguous().numpy().astype(kind).tofile(file)
        result = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{command[-1]} failed: {result.stderr.strip()}")
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    labels = torch.tensor([int(row[0]) for row in rows])
    return labels, torch.tensor([[float(value) for value in row[2:]] for row in rows])


def compiled_scores(
    folder: Path, windows: Tensor, compiler: str, *, samples: Samples = "float"
) -> Tensor:
    """Return scores, (B, C), of windows by the program in a folder, compiled in a temporary one."""
    with tempfile.TemporaryDirectory() as place:
        program = Path(place) / "classify"
        compile_c(folder, program, compiler)
        return run_c([str(program)], windows, samples=samples)[1]
