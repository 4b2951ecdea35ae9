"""Sizes, agreement and time of exported programs: python benchmarks/device.py [RUN ...] > table.md

Prints the tables of docs/device.md: for finished runs, which needs gcc, and for Thumb-2 sizes
arm-linux-gnueabihf-gcc; without runs the sizes on a Cortex-M4, which needs arm-none-eabi-gcc.
--accuracy prints accuracy and weights of the runs alone, without their times.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from processor import processor

from fixpoint.export.agreement import compare, torch_scores
from fixpoint.export.c.compiler import compiled_scores
from fixpoint.export.c.writer import constants, write_c
from fixpoint.export.command import make_network
from fixpoint.export.network import read_network, sensor_windows
from fixpoint.export.onnx import write_onnx
from fixpoint.training import Recipe, load_trained
from fixpoint.training.commands.single_run import train_recipe

ARM = "arm-linux-gnueabihf-gcc"
M4 = (
    *("arm-none-eabi-gcc", "-mcpu=cortex-m4", "-mthumb"),
    *("-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"),
)
MODELS = ("ernn", "fastrnn", "fastgrnn", "ugrnn", "gru", "lstm")
TIMER = r"""
#include <stdio.h>
#include <time.h>
#include "fixpoint.h"
static float window[FIXPOINT_TIMESTEPS * FIXPOINT_INPUTS];
int main(void)
{
    double best = 1e9;
    int i, sum = 0;
    for (i = 0; i < FIXPOINT_TIMESTEPS * FIXPOINT_INPUTS; i++) window[i] = (float)(i % 7) * 0.1f;
    for (i = 0; i < 60; i++) {
        clock_t start = clock();
        sum += fixpoint_classify(window);
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        if (seconds < best) best = seconds;
    }
    printf("%g %d\n", best / FIXPOINT_TIMESTEPS * 1e6, sum);
    return 0;
}
"""


def shell(*command, cwd):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def section_bytes(section, folder, compiler, *flags):
    """Bytes of instructions (.text) or of constants (.rodata)."""
    shell(compiler, "-std=c99", "-Os", *flags, "-c", "fixpoint.c", "-o", "f.o", cwd=folder)
    size = compiler.replace("gcc", "size")
    rows = re.findall(r"^(\.\w+)\S*\s+(\d+)", shell(size, "-A", "f.o", cwd=folder), re.M)
    return sum(int(bytes_) for name, bytes_ in rows if name == section)


def stack_bytes(folder, *compiler):
    """Bytes of the deepest stack of fixpoint_classify with all that it calls."""
    flags = ("-std=c99", "-Os", "-fcallgraph-info=su", "-c", "fixpoint.c", "-o", "f.o")
    shell(*compiler, *flags, cwd=folder)
    text = next(folder.glob("*.ci")).read_text()
    frames = dict(re.findall(r'node: \{ title: "([^"]+)".*?\\n(\d+) bytes', text))
    calls = re.findall(r'edge: \{ sourcename: "([^"]+)" targetname: "([^"]+)"', text)

    def deepest(name):
        called = [deepest(target) for source, target in calls if source == name]
        return int(frames.get(name, 0)) + max(called, default=0)

    return deepest("fixpoint_classify")


def c_microseconds(folder):
    (folder / "timer.c").write_text(TIMER)
    shell("gcc", "-std=c99", "-O2", "fixpoint.c", "timer.c", "-o", "timer", cwd=folder)
    return float(shell(str(folder / "timer"), cwd=folder).split()[0])


def best_microseconds(call, repeats=300):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def peers(run, folder):
    """Microseconds of one time step at batch 1 by torch and by onnxruntime."""
    layer, d = run.model.layer, run.data.x_train.shape[2]
    x, state = torch.zeros(1, d), None
    torch.set_num_threads(1)
    with torch.no_grad():
        step = layer.step if hasattr(layer, "step") else lambda x, _: layer(x.unsqueeze(1))
        of_torch = best_microseconds(lambda: step(x, state))
    write_onnx(read_network(run), folder / "step.onnx", streaming=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(folder / "step.onnx"), options, providers=["CPUExecutionProvider"]
    )
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    given = {
        i.name: np.zeros([1 if isinstance(s, str) else s for s in i.shape], types[i.type])
        for i in session.get_inputs()
    }
    return of_torch, best_microseconds(lambda: session.run(None, given))


def firmware(models=MODELS):
    """Print sizes on a Cortex-M4 of networks trained for one epoch on the bundled sample."""
    print("| model | bits | code B | constants KB | flash KB | state B | stack B |")
    print("|---" * 7 + "|")
    for model in models:
        recipe = Recipe().changed(model=model, hidden=80, epochs=1, normalize="column")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            train_recipe(recipe, folder)
            run = load_trained(folder / recipe.key)
            for bits in (32, 16, 8):
                network = make_network(run, bits=bits, fold=True)
                write_c(network, folder / "c", title="benchmark")
                source = network if bits == 32 else network.network
                code, data = (section_bytes(s, folder / "c", *M4) for s in (".text", ".rodata"))
                sizes = f"{code} | {data / 1024:.1f} | {(code + data) / 1024:.1f}"
                state, stack = 4 * source.state_size + 8, stack_bytes(folder / "c", *M4)
                print(f"| {recipe.label} | {bits} | {sizes} | {state} | {stack} |", flush=True)


def programs(run):
    """Yield bits, network and folder of the three programs of a run, and how they agree."""
    windows, expected = sensor_windows(run.raw, "test"), torch_scores(run)
    for bits in (32, 16, 8):
        network = make_network(run, bits=bits, fold=True)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_c(network, folder, title="benchmark")
            found = compare(compiled_scores(folder, windows, "gcc"), expected, run.data.y_test)
            yield bits, network, folder, found


def first_columns(run, bits, found, network):
    """Data, model, bits, agreement, and bytes of weights and tables."""
    arrays = constants(network)
    tables = sum(a.bytes for a in arrays if a.is_table)
    weights = sum(a.bytes for a in arrays) - tables
    return (
        run.data.name,
        run.recipe.label,
        bits,
        f"{found.accuracy:.2f} (torch {found.reference:.2f})",
        f"{found.equal} of {found.windows}",
        f"{weights / 1024:.1f}",
        f"{tables / 1024:.1f}",
    )


HEAD = "| data | model | bits | accuracy % | labels as torch | weights KB | tables KB |"


def accuracy(runs):
    """Print accuracy and agreement of the programs."""
    print(f"{HEAD}\n{'|---' * 7}|")
    for run in map(load_trained, runs):
        for bits, network, _, found in programs(run):
            row = first_columns(run, bits, found, network)
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--accuracy", action="store_true")
    given = parser.parse_args()
    runs = given.runs
    if not runs:
        firmware()
        return
    if given.accuracy:
        accuracy(runs)
        return
    print(
        f"{HEAD} state B "
        "| stack B | code B, x86-64 | code B, Thumb-2 | products a step | us a step |\n"
        + "|---" * 13
        + "|"
    )
    steps = []
    for path in runs:
        run = load_trained(path)
        for bits, network, folder, found in programs(run):
            source = network if bits == 32 else network.network
            thumb = section_bytes(".text", folder, ARM, "-mthumb") if shutil.which(ARM) else "-"
            row = (
                *first_columns(run, bits, found, network),
                4 * source.state_size + 8,
                stack_bytes(folder, "gcc"),
                section_bytes(".text", folder, "gcc"),
                thumb,
                source.multiplications,
                f"{c_microseconds(folder):.1f}",
            )
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
            if bits == 32:
                steps.append((run.data.name, run.recipe.label, *peers(run, folder)))
    print("\n| data | model | torch, us a step | onnxruntime, us a step |\n|---|---|---|---|")
    for data, label, of_torch, of_onnx in steps:
        print(f"| {data} | {label} | {of_torch:.0f} | {of_onnx:.1f} |")
    versions = (torch.__version__, onnxruntime.__version__, sys.version.split()[0])
    print(f"\n{processor()}")
    print("torch {}, onnxruntime {}, Python {}, one thread, gcc -O2.".format(*versions))


if __name__ == "__main__":
    main()
