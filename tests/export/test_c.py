"""The C program: equal to torch in float, without warnings, safe for any input."""

import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.random_runs import (
    MODELS,
    NORMALIZATIONS,
    SANITIZED,
    STRICT,
    compiler_of,
    hostile,
    random_network,
)

from fixpoint.export.agreement import label
from fixpoint.export.c.compiler import compile_c
from fixpoint.export.c.writer import write_c
from fixpoint.export.integer_network import to_integers
from fixpoint.export.layers import read_layers
from fixpoint.models import ERNN

COMPILERS = [
    pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"needs {name}"))
    for name in ("gcc", "clang")
]
pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")


def close(scores, expected):
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_scores_are_those_of_torch(options, compiler, windows, execute):
    network = random_network(**options)
    labels, scores = execute(network, windows, compiler=compiler)
    expected = network.scores(windows)
    close(scores, expected)
    assert torch.equal(labels, label(expected))


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_normalization_is_part_of_the_program(normalize, windows, execute):
    network = random_network(normalize=normalize)
    close(execute(network, windows)[1], network.scores(windows))


def test_a_shared_eta(windows, execute):
    layers = read_layers(ERNN(9, 12, max_iter=2), 128, fold=True)
    shared = replace(random_network(), layers=layers).to(torch.float32)
    close(execute(shared, windows)[1], shared.scores(windows))


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_sanitizers_find_nothing_whatever_the_input(options, windows, execute):
    """Of programs in float; those in fixed point are looked at in `test_fixed_point.py`."""
    normalize = "column" if options["model"] == "fastgrnn" else "asinh"
    network = random_network(normalize=normalize, **options)
    every = torch.cat([windows[:4], hostile(windows)])
    labels, scores = execute(network, every, compiler=compiler_of(str(options)), flags=SANITIZED)
    spoiled = ~every.isfinite().flatten(1).all(1)
    assert (labels[spoiled] == -1).all()
    assert scores[spoiled].isnan().all()
    assert torch.equal(labels, label(scores))
    close(scores[:4], network.scores(every[:4]))


PROBE = r"""
#include <stdio.h>
#include "fixpoint.h"
static float window[FIXPOINT_TIMESTEPS * FIXPOINT_INPUTS];
int main(int argc, char **argv)
{
    fixpoint_state state;
    float scores[FIXPOINT_CLASSES];
    FILE *file = fopen(argv[argc - 1], "rb");
    int i, last = 0;
    if (file == NULL || fread(window, sizeof(float), sizeof window / 4, file) != sizeof window / 4)
        return 1;
    printf("%d\n", fixpoint_classify(window));
    fixpoint_reset(&state);
    for (i = 0; i <= FIXPOINT_TIMESTEPS; i++) {
        last = fixpoint_step(&state, window + (i % FIXPOINT_TIMESTEPS) * FIXPOINT_INPUTS);
        if (i == FIXPOINT_TIMESTEPS - 1) {
            fixpoint_scores(&state, scores);
            printf("%d\n", fixpoint_class(scores));
        }
    }
    printf("%d %d [%s]\n", last, (int)state.t, fixpoint_class_name(FIXPOINT_CLASSES));
    fclose(file);
    return 0;
}
"""


def probe(network, window, folder):
    write_c(network, folder, title="a test")
    (folder / "main.c").write_text(PROBE)
    compile_c(folder, folder / "probe", "gcc", flags=SANITIZED)
    window.numpy().tofile(folder / "window.bin")
    command = [folder / "probe", folder / "window.bin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")


@pytest.mark.parametrize("bits", [32, 8])
def test_steps_of_their_own_end_with_the_window(bits, windows, tmp_path):
    network = random_network()
    if bits < 32:
        network = to_integers(network, windows, bits=bits)
    expected = str(label(network.scores(windows[:1])).item())
    assert probe(network, windows[:1], tmp_path)[:3] == [expected, expected, "-2 128 []"]


def test_without_them_a_stream_has_no_end(windows, tmp_path):
    network = random_network(model="fastrnn")
    assert probe(network, windows[:1], tmp_path)[2] == "0 129 []"


FUNCTIONS = r"""
#include <stdio.h>
#include "fixpoint.c"
int main(void)
{
    float x;
    while (fread(&x, sizeof x, 1, stdin) == 1) {
        float y = CALL(x);
        fwrite(&y, sizeof y, 1, stdout);
    }
    return 0;
}
"""


@pytest.mark.parametrize(
    ("call", "exact"),
    [
        ("tanh_of", np.tanh),
        ("sigmoid_of", lambda x: 1 / (1 + np.exp(-x))),
        ("asinh_of", np.arcsinh),
    ],
)
def test_functions_are_those_of_the_library(call, exact, tmp_path):
    write_c(random_network(model="fastgrnn"), tmp_path, title="a test")
    (tmp_path / "f.c").write_text(FUNCTIONS.replace("CALL", call))
    subprocess.run(["gcc", "-std=c99", "f.c", "-o", "f"], cwd=tmp_path, check=True)
    size = np.concatenate([np.geomspace(1e-30, 3e38, 20001), np.linspace(0, 20, 20001)])
    x = np.concatenate([size, -size]).astype(np.float32)
    result = subprocess.run([tmp_path / "f"], input=x.tobytes(), capture_output=True, check=True)
    with np.errstate(over="ignore"):
        expected = exact(x.astype(np.float64))
    # Three units in the last place; the sigmoid ends at exp(-87).
    given = np.frombuffer(result.stdout, np.float32)
    np.testing.assert_allclose(given, expected, rtol=3 * 2.0**-23, atol=2e-38)


ARM = ("arm-linux-gnueabihf-gcc", "qemu-arm")


@pytest.mark.skipif(not all(map(shutil.which, ARM)), reason=f"needs {' and '.join(ARM)}")
@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("model", ["ernn", "fastgrnn"])
def test_on_32_bit_arm(model, bits, windows, execute):
    network = random_network(model=model)
    if bits < 32:
        network = to_integers(network, windows, bits=bits)
    labels, scores = execute(
        network, windows, compiler=ARM[0], flags=(*STRICT, "-static"), prefix=(ARM[1],)
    )
    close(scores, network.scores(windows))
    assert torch.equal(labels, label(scores))
