"""Exported layers give the same elsewhere."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fixpoint.models import ERNN, EURNN, UGRNN, FastGRNN, FastRNN, SpectralRNN

LAYERS = {
    "ernn": lambda **options: ERNN(3, 5, max_iter=2, timesteps=2, rank=2, **options),
    "ernn-one-step": lambda **options: ERNN(3, 5, **options),
    "self-feedback": lambda **options: ERNN(3, 5, map="self-feedback", max_iter=2, **options),
    "fastrnn": lambda **options: FastRNN(3, 5, **options),
    "fastgrnn": lambda **options: FastGRNN(3, 5, **options),
    "ugrnn": lambda **options: UGRNN(3, 5, **options),
    "spectral": lambda **options: SpectralRNN(3, 5, reflections=2, **options),
    "eurnn": lambda **options: EURNN(3, 5, **options),
}
BATCHES = (1, 2, 5)  # traced with 3
# Each with a layout of its own; layers and directions are those of the base class.
SHAPES = {
    "one layer": {"batch_first": True},
    "stacked, bidirectional": {"num_layers": 2, "bidirectional": True},
}
CASES = [*((name, "one layer") for name in LAYERS), ("fastgrnn", "stacked, bidirectional")]


def sample(batch, *, batch_first=False, **_):
    return torch.randn(*((batch, 2, 3) if batch_first else (2, batch, 3)))


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def exported(request):
    """A layer, its options, and its graph for a batch of any size."""
    name, shape = request.param
    torch.manual_seed(0)
    layer, options = LAYERS[name](**SHAPES[shape]).eval(), SHAPES[shape]
    axis = {0 if "batch_first" in options else 1: torch.export.Dim("B", min=1, max=64)}
    given = (sample(3, **options),)
    return layer, options, torch.export.export(layer, given, dynamic_shapes=(axis,))


def test_torch_export_takes_any_batch(exported):
    layer, options, program = exported
    for x in (sample(batch, **options) for batch in BATCHES):
        for found, expected in zip(program.module()(x), layer(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# What torch's own exporter warns of.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_onnx_takes_any_batch(exported, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra onnx)")
    pytest.importorskip("onnxscript", reason="needs onnxscript (extra onnx)")
    (layer, options, program), path = exported, str(tmp_path / "layer.onnx")
    torch.onnx.export(program, f=path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    for x in (sample(batch, **options) for batch in BATCHES):
        outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        for found, expected in zip(outputs, layer(x), strict=True):
            np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_safetensors(make, tmp_path):
    torch.manual_seed(0)
    layer, x = make(), sample(2)
    save_file(layer.state_dict(), tmp_path / "weights.safetensors")
    other = make()
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(other(x)[0], layer(x)[0])
