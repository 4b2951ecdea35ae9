"""The gated recurrence alone: against the published cells in NumPy, saturated gates, its checks."""

import numpy as np
import pytest
import torch
from support.recurrences import assert_same, outcome
from support.recurrences import gated_problem as problem

from fixpoint.models.ops.recurrence.gated import gated_scan, gated_scan_reference

pytestmark = pytest.mark.usefixtures("backend")
FACTORS = {"p": 0.7, "q": 0.1}


@pytest.fixture(params=[1, 2], ids=["shared product", "two products"])
def products(request):
    return request.param


def logistic(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cell", ["FastGRNN", "UGRNN"])
def test_equals_the_published_cells_in_numpy(cell, dtype):
    """Their update equations, written out step by step in float64."""
    rng = np.random.default_rng(0)
    T, B, n, d, zeta, nu = 9, 3, 7, 2, 1.0, -4.0
    x, h = rng.normal(size=(T, B, d)), rng.normal(size=(B, n))
    W1, W2 = rng.normal(size=(2, n, d))
    V1, V2 = 0.3 * rng.normal(size=(2, n, n))
    b_z, b_c = rng.normal(size=(2, n))
    if cell == "FastGRNN":
        V, W, p, q = V1, W1, logistic(zeta), logistic(nu)
    else:
        V, W, p, q = np.concatenate([V1, V2]), np.concatenate([W1, W2]), 1.0, 0.0
    arrays = {"V": V, "W": W, "h0": h, "bias": np.concatenate([b_z, b_c]), "p": p, "q": q}
    tensors = {k: torch.tensor(v, dtype=dtype) for k, v in arrays.items()}
    got = gated_scan(torch.tensor(x, dtype=dtype), **tensors, activation="tanh")
    for t in range(T):
        if cell == "FastGRNN":
            z = logistic(x[t] @ W1.T + h @ V1.T + b_z)
            c = np.tanh(x[t] @ W1.T + h @ V1.T + b_c)
            h = z * h + (logistic(zeta) * (1 - z) + logistic(nu)) * c
        else:
            z = logistic(x[t] @ W1.T + h @ V1.T + b_z)
            c = np.tanh(x[t] @ W2.T + h @ V2.T + b_c)
            h = z * h + (1 - z) * c
        np.testing.assert_allclose(
            got[t].numpy(), h, atol=1e-6 if dtype == torch.float32 else 1e-14
        )


def test_numbers_for_p_and_q(products):
    arguments = problem(5, 3, 4, products, 2)
    tensors = arguments | {k: torch.tensor(v, dtype=torch.float64) for k, v in FACTORS.items()}
    expected = outcome(gated_scan_reference, tensors, activation="tanh")
    got = gated_scan(**(arguments | FACTORS), activation="tanh")
    assert_same([got.detach()], expected[:1])


def test_bias_without_input_weights(products):
    arguments = problem(5, 3, 4, products)
    arguments["bias"] = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
    expected = outcome(gated_scan_reference, arguments, activation="tanh")
    assert_same(outcome(gated_scan, arguments, activation="tanh"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_gates(products, dtype):
    """A shut gate keeps nothing of the state, an open one keeps it as it is; no NaN in between."""
    arguments = problem(3, 2, 4, products, 2, dtype=dtype)
    with torch.no_grad():
        arguments["bias"][:4] = torch.tensor([-200.0, 200.0, -20.0, 20.0])
        arguments |= {"p": torch.ones((), dtype=dtype), "q": torch.zeros((), dtype=dtype)}
    expected = outcome(gated_scan_reference, arguments, activation="tanh")
    got = outcome(gated_scan, arguments, activation="tanh")
    assert torch.equal(got[0][:, :, 1], arguments["h0"][:, 1].expand(3, 2))
    assert_same(got, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"V": torch.zeros(12, 4)}, r"V must be \(4, 4\) or \(8, 4\), not \(12, 4\)"),
        ({"W": torch.zeros(7, 2)}, r"W must be \(4, 2\), not \(7, 2\).*V is \(4, 4\)"),
        ({"bias": torch.zeros(4)}, r"bias must be \(8,\), not \(4,\)"),
        ({"p": torch.zeros(4)}, r"p must be a number or have no axes, not \(4,\)"),
    ],
)
@pytest.mark.parametrize("scan", [gated_scan, gated_scan_reference])
def test_bad_arguments(scan, change, message):
    arguments = problem(2, 3, 4, 1, 2, dtype=torch.float32, grad=False)
    with pytest.raises(ValueError, match=message):
        scan(**(arguments | {"activation": "relu"} | change))
