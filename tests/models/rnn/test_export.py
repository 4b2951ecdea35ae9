"""Exported layers give the same elsewhere."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fixpoint.models import ERNN, EURNN, UGRNN, FastGRNN, FastRNN, SpectralRNN

LAYERS = {
    "ernn": lambda **options: ERNN(3, 5, max_iter=2, timesteps=2, rank=2, **options),
    "ernn-one-step": lambda **options: ERNN(3, 5, **options),
    "self-feedback": lambda **options: ERNN(3, 5, cell="self-feedback", max_iter=2, **options),
    "fastrnn": lambda **options: FastRNN(3, 5, **options),
    "fastgrnn": lambda **options: FastGRNN(3, 5, **options),
    "ugrnn": lambda **options: UGRNN(3, 5, **options),
    "spectral": lambda **options: SpectralRNN(3, 5, reflections=2, **options),
    "eurnn": lambda **options: EURNN(3, 5, **options),
}
BATCHES = (1, 2, 5)  # traced with 3
# Each with a layout of its own.
SHAPES = {
    "one layer": {"batch_first": True},
    "stacked, bidirectional": {"num_layers": 2, "bidirectional": True},
}


@pytest.fixture(params=LAYERS)
def make(request):
    torch.manual_seed(0)
    return LAYERS[request.param]


def sample(batch, *, batch_first=False, **_):
    return torch.randn(*((batch, 2, 3) if batch_first else (2, batch, 3)))


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_export_takes_any_batch(make, shape):
    options = SHAPES[shape]
    layer = make(**options).eval()
    axis = {0 if "batch_first" in options else 1: torch.export.Dim("B", min=1, max=64)}
    given = (sample(3, **options),)
    program = torch.export.export(layer, given, dynamic_shapes=(axis,)).module()
    for x in (sample(batch, **options) for batch in BATCHES):
        for found, expected in zip(program(x), layer(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# What torch's own exporter warns of.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_onnx_takes_any_batch(make, shape, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra onnx)")
    pytest.importorskip("onnxscript", reason="needs onnxscript (extra onnx)")
    options = SHAPES[shape]
    layer, path = make(**options).eval(), str(tmp_path / "layer.onnx")
    axis = {0 if "batch_first" in options else 1: torch.export.Dim("B", min=1, max=64)}
    given = (sample(3, **options),)
    torch.onnx.export(layer, given, path, dynamo=True, verbose=False, dynamic_shapes=(axis,))
    session = runtime.InferenceSession(path)
    for x in (sample(batch, **options) for batch in BATCHES):
        outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        for found, expected in zip(outputs, layer(x), strict=True):
            np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_safetensors(make, tmp_path):
    layer, x = make(), sample(2)
    save_file(layer.state_dict(), tmp_path / "weights.safetensors")
    other = make()
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(other(x)[0], layer(x)[0])
