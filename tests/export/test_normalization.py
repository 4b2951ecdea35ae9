"""Channels with an offset: labels as torch, and errors below the bound that is printed."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.random_runs import SANITIZED, random_network

from fixpoint.data import Normalization
from fixpoint.export import InputScale, read_network
from fixpoint.export.agreement import compare, torch_scores
from fixpoint.export.c.compiler import compile_c, compiled_scores, run_c
from fixpoint.export.c.writer import write_c
from fixpoint.export.command import make_network
from fixpoint.export.integer_network import to_integers
from fixpoint.export.network import sensor_windows
from fixpoint.training import Recipe, load_trained
from fixpoint.training.commands.single_run import train_recipe

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")

CENTERS = np.array([101325.0, 293.15, 48.1372])
SPREADS = np.array([12.0, 0.3, 0.0004])


def signals(count=400, T=30, *, seed=0):
    """Pressure in Pa, kelvin and degrees of latitude: two classes of waves, which drift."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, count)
    t = np.arange(T)[:, None]
    phase = draw.uniform(0, 6, (count, 1, 3))
    waves = np.sin((0.3 + 0.3 * y[:, None, None]) * t + phase) + draw.normal(0, 0.5, (count, T, 3))
    return CENTERS + SPREADS * (waves + 3 * np.sin(t / 9)), y


@pytest.fixture(scope="module", params=["column", "channel", "asinh"])
def trained(request, tmp_path_factory):
    """A run on signals with offsets, for each normalization."""
    out = tmp_path_factory.mktemp("runs")
    x, y = signals()
    np.savez(out / "far.npz", x=x, y=y)
    recipe = Recipe().changed(
        dataset=str(out / "far.npz"), normalize=request.param, hidden=16, epochs=4, model="fastrnn"
    )
    train_recipe(recipe, out)
    return load_trained(out / recipe.key)


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_labels_are_those_of_torch(bits, trained, tmp_path):
    network = make_network(trained, bits=bits, fold=True)
    write_c(network, tmp_path, title="a test")
    windows = sensor_windows(trained.raw, "test")
    given = compiled_scores(tmp_path, windows, "gcc")
    found = compare(given, torch_scores(trained), trained.raw.y_test)
    # A sample as a float32 is wrong by 0.005 s.d. of latitude, so that a near tie may fall over.
    assert found.equal >= found.windows - (2 if bits == 8 else 1)
    assert found.median < (0.05 if bits == 8 else 0.01) * found.spread


PROBE = r"""
#include <stdio.h>
#include "fixpoint.c"
int main(void)
{
    fixpoint_state state;
    float sample[FIXPOINT_INPUTS];
    fixpoint_reset(&state);
    while (fread(sample, sizeof sample, 1, stdin) == 1) {
        int16_t x[FIXPOINT_INPUTS];
        if (normalize(&state, sample, x) != FIXPOINT_OK)
            return 1;
        fwrite(x, sizeof x, 1, stdout);
        state.t = (state.t + 1) % FIXPOINT_TIMESTEPS;
    }
    return 0;
}
"""


def normalized_by_c(network, windows, folder):
    """x' of windows (B, T, d) as the compiled program rounds it."""
    write_c(network, folder, title="a test")
    (folder / "probe.c").write_text(PROBE)
    subprocess.run(["gcc", "-std=c99", "probe.c", "-o", "probe"], cwd=folder, check=True)
    samples = windows.float().contiguous().numpy().tobytes()
    out = subprocess.run([folder / "probe"], input=samples, capture_output=True, check=True).stdout
    integers = np.frombuffer(out, np.int16).reshape(windows.shape)
    return network.inputs.unit * integers.astype(np.float64)


@pytest.mark.parametrize("bits", [16, 8])
def test_the_printed_bound_is_the_true_one(bits, trained, tmp_path):
    network = make_network(trained, bits=bits, fold=True)
    x = torch.from_numpy(signals(200, seed=1)[0])
    given = normalized_by_c(network, x, tmp_path)
    exact = trained.form.normalization.apply(x).numpy()
    inside = np.abs(exact) < 32767 * network.inputs.unit
    error = np.abs(given - exact)[inside].max()
    bound = network.inputs.bound
    assert 0.1 * bound < error <= bound


def test_columns_of_very_different_spread_have_a_finer_table(tmp_path):
    """A table of 16 bits would lose the scale of the columns that vary most."""
    draw = torch.Generator().manual_seed(0)
    spread = torch.logspace(0, 5, 128)[:, None].expand(128, 9)
    windows = torch.randn(300, 128, 9, generator=draw) * spread + 1000
    center, sd = windows.double().mean(0), windows.double().std(0)
    scale = InputScale.of(Normalization(center, sd))
    network = to_integers(replace_inputs(random_network(), scale), windows, bits=16)
    assert network.inputs.arrays[1][2].dtype == np.int32
    given = normalized_by_c(network, windows[:50], tmp_path)
    exact = ((windows[:50].double() - center) / sd).numpy()
    assert np.abs(given - exact).max() <= network.inputs.bound < 0.05


def replace_inputs(network, inputs):
    return replace(network, inputs=inputs)


def test_a_float_program_does_not_cancel(trained):
    """(x - mean) * scale in float32 is as near as the rounding of the samples allows."""
    network = read_network(trained)
    x = torch.from_numpy(signals(50, seed=2)[0])
    rows = trained.form.normalization
    exact = (rows.apply(x.float().double())).float()
    given = torch.stack([network.inputs.apply(x[:, t].float(), t) for t in range(30)], 1)
    torch.testing.assert_close(given, exact, rtol=3e-5, atol=3e-5)


FLAGS = {
    "no contraction": ("-std=c99", "-O2"),
    "contraction": ("-std=gnu99", "-O2", "-ffp-contract=fast"),
    "fused": ("-std=gnu99", "-O3", "-ffp-contract=fast", "-march=haswell"),
}


def has_fma():
    place = Path("/proc/cpuinfo")
    return place.is_file() and " fma " in place.read_text()


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_scores_have_the_same_bits_with_fused_multiply_add(bits, trained, tmp_path):
    network = make_network(trained, bits=bits, fold=True)
    write_c(network, tmp_path, title="a test")
    windows = sensor_windows(trained.raw, "test")
    names = [name for name in FLAGS if name != "fused" or has_fma()]
    scores = []
    for name in names:
        compile_c(tmp_path, tmp_path / "classify", "gcc", flags=FLAGS[name])
        scores.append(run_c([str(tmp_path / "classify")], windows)[1])
    assert all(torch.equal(other, scores[0]) for other in scores[1:])
    if bits == 32 and has_fma():
        # Asked for, they are used.
        compile_c(tmp_path, tmp_path / "classify", "gcc", flags=(*FLAGS["fused"], "-DFIXPOINT_FMA"))
        assert not torch.equal(run_c([str(tmp_path / "classify")], windows)[1], scores[0])


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast"])
def test_a_window_with_nan_has_no_class_with_fast_math(flag, bits, trained, tmp_path):
    network = make_network(trained, bits=bits, fold=True)
    write_c(network, tmp_path, title="a test")
    compile_c(tmp_path, tmp_path / "classify", "gcc", flags=("-std=c99", "-O2", flag))
    windows = sensor_windows(trained.raw, "test")[:3].clone()
    windows[1, 4, 2] = torch.nan
    windows[2, 4, 0] = torch.inf
    labels, scores = run_c([str(tmp_path / "classify")], windows)
    assert labels.tolist()[1:] == [-1, -1]
    assert labels[0] >= 0
    assert scores[1:].isnan().all()


@pytest.mark.parametrize(
    ("center", "spread", "message"),
    [
        (0.0, 1e-39, "channel 1 varies by 1e-39, which a program in float32 cannot hold"),
        (0.0, 1e39, "channel 1 varies by 1e.39, which a program in float32 cannot hold"),
        (1e9, 0.5, "channel 1 varies by 0.5 about 1e.09, which the float samples of a device"),
    ],
)
def test_a_normalization_that_float32_cannot_hold_is_refused(center, spread, message):
    one = torch.ones(2, dtype=torch.float64)
    given = Normalization(
        torch.tensor([0.0, center], dtype=torch.float64),
        torch.tensor([1.0, spread], dtype=torch.float64) * one,
    )
    with pytest.raises(ValueError, match=message):
        InputScale.of(given)


def test_a_constant_column_is_0(tmp_path):
    center = torch.tensor([123456789.123, 0.0], dtype=torch.float64)
    scale = InputScale.of(Normalization(center, torch.ones(2, dtype=torch.float64)))
    assert scale.apply(center.float()[None], 0).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("normalize", ["column", "channel", "asinh"])
@pytest.mark.parametrize("bits", [16, 8])
def test_counts_of_a_sensor_need_no_float(bits, normalize, tmp_path):
    """The program equals NumPy bit by bit, and names no float but in its softmax."""
    draw = torch.Generator().manual_seed(0)
    windows = (torch.randn(40, 128, 9, generator=draw) * 300 + 12000).round()
    over = 0 if normalize == "column" else (0, 1)
    found = Normalization(
        windows.double().mean(over), windows.double().std(over), normalize == "asinh"
    )
    network = replace_inputs(random_network(), InputScale.of(found))
    made = to_integers(network, windows, bits=bits, samples="int16")
    write_c(made, tmp_path, title="a test")
    compile_c(tmp_path, tmp_path / "classify", "gcc", flags=SANITIZED)
    extreme = torch.stack([torch.full((128, 9), v) for v in (32767.0, -32767.0, 0.0)])
    every = torch.cat([windows, extreme])
    labels, scores = run_c([str(tmp_path / "classify")], every, samples="int16")
    assert torch.equal(scores, made.scores(every))
    close = compare(scores[:40], network.scores(windows), labels[:40])
    assert close.median < (0.1 if bits == 8 else 0.01) * close.spread
    body = (tmp_path / "fixpoint.c").read_text()
    without = body[body.index("round_shift(") : body.index("void fixpoint_probabilities")]
    assert "float" not in without


def test_counts_must_be_whole_numbers(windows):
    with pytest.raises(ValueError, match=r"--input int16 takes samples that are whole numbers"):
        to_integers(random_network(), windows, bits=16, samples="int16")
