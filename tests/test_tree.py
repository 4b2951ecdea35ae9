"""States that are no tree of equal-sized floating-point tensors, and maps that change them."""

import numpy as np
import pytest
import torch

from fixpoint import solve


@pytest.mark.parametrize(
    ("z0", "error", "text"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), TypeError, r"floating-point.*int64.*z0.float\(\)"),
        ([torch.zeros(2), 1.0], TypeError, "tree of tensors; it holds float: torch.as_tensor"),
        (np.zeros((2, 1)), TypeError, r"it holds numpy.ndarray: torch.as_tensor makes one"),
        ([], ValueError, "at least one tensor"),
        (torch.tensor(1.0), ValueError, "batched=False"),
        ([torch.zeros(2, 1), torch.zeros(3, 1)], ValueError, r"same batch size; got \[2, 3\]"),
        ([torch.zeros(2), torch.zeros(2).double()], TypeError, "one dtype; got"),
        ([torch.zeros(2), torch.zeros(2, device="meta")], TypeError, "one device; got"),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(z0, error, text):
    with pytest.raises(error, match=text):
        solve(lambda z: z, z0)


@pytest.mark.parametrize(
    ("phi", "error", "text"),
    [
        (lambda z: z[:, :1], ValueError, r"shapes of its input, \[\(2, 3\)\].*\[\(2, 1\)\]"),
        (lambda z: z.sum(), ValueError, r"returned \[\(\)\]"),
        (
            lambda z: (z, z),
            ValueError,
            "must return what it is given, a tensor; it returned .tensor, tensor.",
        ),
        (lambda z: None, TypeError, "must return a tensor; it returned NoneType: add its return"),
        (lambda z: z.numpy(), TypeError, "a tensor; it returned numpy.ndarray: compute with torch"),
        (lambda z: 1.0, TypeError, "must return a tensor; it returned float: compute with torch"),
        (lambda z: z.double(), TypeError, "dtype of its input, torch.float32.*torch.float64"),
    ],
)
def test_a_map_that_changes_the_state_is_refused(phi, error, text):
    with pytest.raises(error, match=text):
        solve(phi, torch.zeros(2, 3))


def test_autocast_may_lower_the_precision_inside_the_map():
    linear = torch.nn.Linear(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = solve(lambda z: torch.tanh(0.3 * linear(z)), torch.zeros(2, 3))
    assert solution.z.dtype == torch.float32
