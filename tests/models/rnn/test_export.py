"""Exported layers give the same elsewhere."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fixpoint.models import ERNN, FastGRNN

LAYERS = {
    "ernn": lambda **options: ERNN(3, 5, max_iter=2, timesteps=6, rank=2, **options),
    "fastgrnn": lambda **options: FastGRNN(3, 5, **options),
}


@pytest.fixture(params=LAYERS)
def make(request):
    torch.manual_seed(0)
    return LAYERS[request.param]


def sample(batch_first):
    return torch.randn(*((2, 6, 3) if batch_first else (6, 2, 3)))


@pytest.mark.parametrize("batch_first", [False, True])
def test_torch_export(make, batch_first):
    layer, x = make(batch_first=batch_first), sample(batch_first)
    program = torch.export.export(layer, (x,))
    for given, expected in zip(program.module()(x), layer(x), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


# What torch's own exporter warns of.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("batch_first", [False, True])
def test_onnx(make, batch_first, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra onnx)")
    pytest.importorskip("onnxscript", reason="needs onnxscript (extra onnx)")
    layer, x = make(batch_first=batch_first).eval(), sample(batch_first)
    path = str(tmp_path / "layer.onnx")
    torch.onnx.export(layer, (x,), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    given = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for ours, expected in zip(given, layer(x), strict=True):
        np.testing.assert_allclose(ours, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_safetensors(make, tmp_path):
    layer, x = make(), sample(False)
    save_file(layer.state_dict(), tmp_path / "weights.safetensors")
    other = make()
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(other(x)[0], layer(x)[0])
