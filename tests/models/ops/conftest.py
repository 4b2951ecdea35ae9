import importlib.util

import pytest
import torch

from fixpoint.models.ops.common import dispatch


@pytest.fixture(params=["numba", "torch"])
def backend(request, monkeypatch):
    """Each kernel module, with new buffers full of NaN, so that a read before a write shows."""
    if request.param == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("needs numba")
    monkeypatch.setattr(
        dispatch,
        "backend",
        lambda name, h: dispatch.module(name, f"{request.param}_kernels"),
    )
    empty = dispatch.empty
    monkeypatch.setattr(dispatch, "empty", lambda *args: empty(*args).fill_(torch.nan))
    return request.param
