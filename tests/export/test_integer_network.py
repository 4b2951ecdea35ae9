"""Fixed point: the C program equals the integer arithmetic of NumPy, whose errors are bounded."""

import shutil

import numpy as np
import pytest
import torch
from support.random_runs import (
    MODELS,
    NORMALIZATIONS,
    SANITIZED,
    compiler_of,
    hostile,
    random_network,
)

from fixpoint.export import integers
from fixpoint.export.agreement import label
from fixpoint.export.calibration import quantize
from fixpoint.export.integer_network import to_integers

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")


@needs_gcc
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_the_program_equals_numpy_bit_by_bit(options, bits, windows, execute):
    """And the sanitizers find nothing, whatever the input."""
    normalize = "column" if options["model"] == "fastgrnn" else "asinh"
    network = random_network(normalize=normalize, **options)
    network = to_integers(network, windows, bits=bits)
    huge = torch.full_like(windows[:1], 1e30)
    every = torch.cat([windows[::2], 50 * windows[:8], huge, hostile(windows)])
    compiler = compiler_of(f"{options} {bits}")
    labels, scores = execute(network, every, compiler=compiler, flags=SANITIZED)
    torch.testing.assert_close(scores, network.scores(every), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(labels, label(scores))
    spoiled = ~every.isfinite().flatten(1).all(1)
    assert (labels[spoiled] == -1).all()


@needs_gcc
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_every_normalization_equals_numpy(normalize, windows, execute):
    network = to_integers(random_network(normalize=normalize), windows, bits=16)
    assert torch.equal(execute(network, windows)[1], network.scores(windows))


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_sixteen_bits_are_near_float(options, windows):
    network = random_network(**options)
    expected = network.scores(windows)
    given = to_integers(network, windows, bits=16).scores(windows)
    assert (given - expected).abs().max() < 0.01 * expected.std()


@pytest.mark.parametrize(
    ("name", "exact"),
    [("tanh", np.tanh), ("sigmoid", lambda x: 1 / (1 + np.exp(-x))), ("asinh", np.arcsinh)],
)
def test_errors_of_functions_are_below_their_bounds(name, exact):
    size = np.unique(np.rint(np.geomspace(1, 2**28, 200_001)).astype(np.int64))
    value = np.concatenate([-size, [0], size, np.arange(-3_000_000, 3_000_000, 7)])
    if name == "asinh":
        given, x = integers.log2_asinh_q16(value) * np.log(2) / 65536, value / 65536
    else:
        given, x = getattr(integers, f"{name}_q16")(value, 20) / 65536, value / 2**20
    error = np.abs(given - exact(x)).max()
    # The bound holds, and is at most twice what happens.
    assert 0.5 * integers.function_bound(name) < error <= integers.function_bound(name)


def test_rounding_is_to_nearest():
    value = np.arange(-40, 41)
    rounded = integers.round_shift(value, 3)
    assert (np.abs(rounded - value / 8) <= 0.5).all()
    assert np.array_equal(rounded, -integers.round_shift(-value, 3))
    assert np.array_equal(integers.round_shift(value, 0), value)


@pytest.mark.parametrize("factor", [1e-9, 0.1, 0.75, 1.0, 3.7, 900.0])
@pytest.mark.parametrize("largest", [1, 1000, 1 << 31, 1 << 37])
def test_a_factor_is_near_and_does_not_overflow(factor, largest):
    near = integers.Factor.of(factor, largest)
    bits = min(30, 62 - largest.bit_length())
    assert abs(near.mantissa / 2**near.shift / factor - 1) <= 2.0**-bits
    assert largest * near.mantissa + (1 << near.shift >> 1) < 1 << 63
    assert 0 <= near.shift <= 62


@pytest.mark.parametrize("bits", [8, 16])
def test_a_matrix_is_rounded_to_nearest_unless_clipped(bits):
    torch.manual_seed(0)
    W = torch.randn(6, 5).numpy()
    W[0, 0] = 40.0
    matrix = quantize(torch.from_numpy(W), bits, np.eye(5))
    error = matrix.integers * matrix.scale - W
    assert np.abs(error.ravel()[1:]).max() <= matrix.bound * (1 + 1e-5)
    assert matrix.error == pytest.approx(np.sqrt(np.sum(error**2) / np.sum(W**2)), rel=1e-3)


def test_the_scale_follows_what_the_matrix_multiplies():
    torch.manual_seed(0)
    W = torch.randn(20, 6)
    W[:, 0] *= 4
    # Where the first value is always 0, its large weights cost nothing to clip.
    unused = np.diag([0.0, 1, 1, 1, 1, 1])
    assert quantize(W, 8, unused).scale < 0.6 * quantize(W, 8, np.eye(6)).scale


def test_other_bits_are_refused(windows):
    with pytest.raises(ValueError, match="bits must be 8 or 16 in fixed point, or 32 for float"):
        to_integers(random_network(), windows, bits=4)


def test_windows_without_a_finite_one_are_refused(windows):
    with pytest.raises(ValueError, match="there is none without NaN"):
        to_integers(random_network(), windows * torch.nan, bits=8)


def test_steps_below_a_unit_of_16_bits_are_summed(windows):
    network = random_network(model="ernn", eta=1e-4)
    expected = network.scores(windows)
    given = to_integers(network, windows, bits=16).scores(windows)
    assert (given - expected).abs().max() < 0.02 * expected.std()
