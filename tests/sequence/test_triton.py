"""The Triton scan: compiled without a GPU, and on a GPU where one is."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")

from support.compiled import compile_for  # noqa: E402

from fixpoint.sequence import triton_kernels as kernels  # noqa: E402
from fixpoint.sequence.affine_scan import diagonal_scan  # noqa: E402


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("_chunk_ends", "fp32"), ("_chunk_ends", "bf16"), ("_carries", "fp32")),
        *(("_chunk_states", "fp32"), ("_chunk_states", "bf16")),
    ],
)
def test_compiles(name, reverse, kind, capability, monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel = getattr(kernels, name)
    constants = {"REVERSE": reverse, "CHUNK": kernels.CHUNK, "BLOCK": kernels.BLOCK}
    types = {"carry": "*fp32"} | dict.fromkeys(("a", "r", "delta"), f"*{kind}")
    compiled = compile_for(kernel, types, constants, capability)
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared == 0


def test_columns_are_on_the_axis_of_a_grid_that_has_room(monkeypatch):
    """65,535 programs are the most of the second axis."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    for name in ("_chunk_ends", "_carries", "_chunk_states"):
        monkeypatch.setattr(kernels, name, Kernel())
    a = torch.empty(100, 2**20, 10, device="meta")
    kernels.diagonal_scan(a, a)
    assert len(grids) == 3
    assert all(size <= 65_535 for grid in grids for size in grid[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True])
def test_on_a_gpu(reverse):
    a, r = torch.rand(1000, 16, 80) * 2 - 1, torch.randn(1000, 16, 80)
    expected = diagonal_scan(a, r, reverse=reverse)
    found = kernels.diagonal_scan(a.cuda(), r.cuda(), reverse=reverse).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
