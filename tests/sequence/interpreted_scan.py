"""The Triton scan by the interpreter; `test_interpreted.py` runs this in a process of its own."""

import pytest
import torch

from fixpoint.sequence import triton_kernels as kernels
from fixpoint.sequence.affine_scan import diagonal_scan
from fixpoint.sequence.triton_kernels import diagonal_scan as kernel_scan

CHUNK = 8


@pytest.fixture
def short_chunks(monkeypatch):
    """Eight time steps of a program instead of 64: only the number of turns of a loop."""
    monkeypatch.setattr(kernels, "CHUNK", CHUNK)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (CHUNK, 2, 3), (CHUNK + 1, 2, 65), (25, 1, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_the_loop(dtype, shape, reverse):
    assert_equals_the_loop(dtype, shape, reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_as_on_a_gpu(reverse):
    assert_equals_the_loop(torch.float32, (kernels.CHUNK + 1, 1, 2), reverse)


def assert_equals_the_loop(dtype, shape, reverse):
    a = (torch.rand(shape) * 2.2 - 1.1).to(dtype)
    a[len(a) // 2] = 0.0
    r = torch.randn(shape).to(dtype)
    expected = diagonal_scan(a.float(), r.float(), reverse=reverse)
    found = kernel_scan(a, r, reverse=reverse)
    assert found.dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected, rtol=limit, atol=limit)


def test_no_columns():
    empty = torch.zeros(5, 0, 3)
    assert kernel_scan(empty, empty).shape == (5, 0, 3)


@pytest.mark.usefixtures("short_chunks")
def test_a_sample_with_nan_leaves_the_others():
    a, r = torch.full((12, 2, 3), 0.5), torch.ones(12, 2, 3)
    clean = kernel_scan(a, r)
    r[3, 0] = torch.nan
    found = kernel_scan(a, r)
    assert found[3:, 0].isnan().all()
    assert torch.equal(found[:, 1], clean[:, 1])
