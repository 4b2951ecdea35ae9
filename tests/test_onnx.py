"""ONNX files of layers that solve to a tolerance: a Loop, any batch, any number of time steps."""

import pytest
import torch

from fixpoint import Anderson, FixedPoint, Implicit, Picard
from fixpoint.models import DEQ, ERNN, LSTM, FastGRNN

onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra onnx)")
pytest.importorskip("onnxscript", reason="needs onnxscript (extra onnx)")


class Layer(torch.nn.Module):
    """A FixedPoint of one's own with an explicit injection."""

    def __init__(self, solver):
        super().__init__()
        self.W, self.fixed_point = torch.nn.Linear(4, 4), FixedPoint(solver)

    def forward(self, x):
        return self.fixed_point(lambda z: torch.tanh(0.4 * self.W(z) + x), torch.zeros_like(x)).z


def session(layer, x, axes):
    """onnxruntime's, of the layer exported with axes of any length, and the ops of its graph."""
    shapes = ({axis: torch.export.Dim(name) for axis, name in axes.items()},)
    with torch.no_grad():
        program = torch.onnx.export(
            layer.eval(), (x,), dynamic_shapes=shapes, dynamo=True, verbose=False
        )
    model = program.model_proto
    return onnxruntime.InferenceSession(model.SerializeToString()), {
        node.op_type for node in model.graph.node
    }


def check(layer, x, axes, others):
    """The outputs of onnxruntime for x and for inputs of other shapes are those of torch."""
    made, kinds = session(layer, x, axes)
    for shape in (x.shape, *others):
        x = torch.randn(shape)
        found = made.run(None, {made.get_inputs()[0].name: x.numpy()})[0]
        with torch.no_grad():
            expected = layer(x)
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)
    return kinds


@pytest.mark.filterwarnings("ignore")  # of the exporter about its own code
@pytest.mark.parametrize(
    "solver",
    [
        Picard(),
        pytest.param(Anderson(memory=2, rtol=1e-6), marks=pytest.mark.slow),
    ],
    ids=lambda solver: type(solver).__name__,
)
def test_a_solve_is_a_loop_for_any_batch(solver):
    torch.manual_seed(0)
    make = _deq if isinstance(solver, Anderson) else Layer
    kinds = check(make(solver), torch.randn(3, 4), {0: "batch"}, [(1, 4), (20, 4)])
    assert "Loop" in kinds


def _deq(solver):
    W = torch.nn.Linear(4, 4)
    return DEQ(lambda z, x: torch.tanh(0.4 * W(z) + x), solver)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporter about its own code
@pytest.mark.parametrize(
    "layer",
    [
        ERNN(2, 3, map="self-feedback", solver=Picard(rtol=1e-6), backward=Implicit()),
        FastGRNN(2, 3, num_layers=2, bidirectional=True),
        LSTM(2, 3, bidirectional=True),
    ],
    ids=["equilibria", "FastGRNN", "LSTM"],
)
def test_layers_take_any_number_of_time_steps(layer):
    kinds = check(layer, torch.randn(3, 2, 2), {0: "time", 1: "batch"}, [(1, 2, 2), (7, 5, 2)])
    assert "Scan" in kinds


def test_steps_of_their_own_are_refused_for_any_number_of_them():
    layer = ERNN(2, 3, timesteps=4).eval()
    with pytest.raises(Exception, match="export it with a fixed number of them"):
        torch.export.export(
            layer, (torch.randn(4, 2, 2),), dynamic_shapes=({0: torch.export.Dim("time", max=4)},)
        )
