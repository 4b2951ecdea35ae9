"""Under torch.compile a recurrence is one operation, and gives what it gives without."""

import pytest
import torch
from torch.autograd import gradgradcheck
from torch.library import opcheck

from fixpoint.models import ERNN, UGRNN, FastGRNN, FastRNN, SpectralRNN

LAYERS = {
    "ernn": lambda: ERNN(3, 5, timesteps=6, rank=2),
    "ernn, two steps": lambda: ERNN(3, 5, max_iter=2, bidirectional=True, batch_first=True),
    "fastrnn": lambda: FastRNN(3, 5, recompute=True),
    "spectral": lambda: SpectralRNN(3, 5, bias=False),
    "fastgrnn": lambda: FastGRNN(3, 5, num_layers=2),
    "ugrnn": lambda: UGRNN(3, 5, bias=False),
}
KINDS = {"fastgrnn": "gated", "ugrnn": "gated"}
COUNT = {"ernn, two steps": 2, "fastgrnn": 2}


def leaky(K=1, *, W=True, **options):
    """The arguments of `fixpoint::leaky`, which need gradients."""
    draw = torch.Generator().manual_seed(0)

    def some(*shape):
        return (0.5 * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_()

    weights = (some(4, 3), some(4)) if W else (None, None)
    tensors = (some(5, 2, 3 if W else 4), *weights, some(4, 4), some(5, K), some(5, K), some(2, 4))
    return (
        *tensors,
        "tanh",
        options.get("last_only", False),
        options.get("recompute", False),
        False,
    )


def gated(gates=1, *, W=True, last_only=False):
    """The arguments of `fixpoint::gated`, which need gradients."""
    draw = torch.Generator().manual_seed(0)

    def some(*shape):
        return (0.5 * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_()

    rows = 4 * gates
    weights = (some(rows, 3), some(8)) if W else (None, None)
    tensors = (some(5, 2, 3 if W else rows), *weights, some(rows, 4), some(), some(), some(2, 4))
    return (*tensors, "sigmoid", last_only, False, False)


def torchs(gates, biases, states, **options):
    """The arguments of `fixpoint::gru` and `fixpoint::lstm`, which need gradients."""
    draw = torch.Generator().manual_seed(0)

    def some(*shape):
        return (0.5 * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_()

    weights = some(4 * gates, 3), some(4 * biases), some(4 * gates, 4)
    start = [some(2, 4) for _ in range(states)]
    last_only, others = options.get("last_only", False), options.get("others", False)
    return (some(5, 2, 3), *weights, *start, "tanh", last_only, False, others)


CASES = {
    "leaky": ("leaky", leaky()),
    "leaky, two steps, last": ("leaky", leaky(2, last_only=True)),
    "leaky, recomputed": ("leaky", leaky(2, W=False, recompute=True)),
    "leaky, recomputed, last": ("leaky", leaky(recompute=True, last_only=True)),
    "gated": ("gated", gated()),
    "gated, two gates, last": ("gated", gated(2, W=False, last_only=True)),
    "gru": ("gru", torchs(3, 4, 1)),
    "lstm": ("lstm", torchs(4, 4, 2)),
    "lstm, all cells, last": ("lstm", torchs(4, 4, 2, last_only=True, others=True)),
}
# Tracing with symbolic sizes takes seconds: once for each recurrence.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    name, arguments = CASES[case]
    whole = {} if case in ("leaky", "lstm") else {"test_utils": QUICK}
    opcheck(getattr(torch.ops.fixpoint, f"{name}_train").default, arguments, **whole)
    detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in arguments]
    opcheck(getattr(torch.ops.fixpoint, name).default, detached, test_utils=QUICK)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_of_a_gradient(case):
    name, arguments = CASES[case]
    count = next(i for i, v in enumerate(arguments) if isinstance(v, str))
    tensors, options = arguments[:count], arguments[count:]
    given = [v for v in tensors if v is not None]

    def output(*values):
        values = iter(values)
        filled = [None if v is None else next(values) for v in tensors]
        return getattr(torch.ops.fixpoint, f"{name}_train")(*filled, *options)[0]

    assert gradgradcheck(output, given, fast_mode=True)


def recorded(graphs):
    """A compiler that changes nothing and keeps the graphs."""

    def compiler(graph, _):
        graphs.append(graph)
        return graph

    return compiler


def operations(graph):
    """How often each operation of the package is called in a graph."""
    names = [str(node.target) for node in graph.graph.nodes]
    return sorted(name for name in names if name.startswith("fixpoint."))


@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_layer_is_one_graph_with_the_same_bits(name):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(6, 6, 3)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(layer, fullgraph=True, backend=recorded(graphs))
    weights = list(layer.parameters())
    results = []
    for call in (layer, compiled):
        output, h_n = call(x)
        gradients = torch.autograd.grad(output.square().sum() + h_n.sum(), weights)
        results.append((output, h_n, *gradients))
    for plain, fast in zip(*results, strict=True):
        assert torch.equal(plain, fast)
    kind = KINDS.get(name, "leaky")
    assert operations(graphs[0]) == [f"fixpoint.{kind}_train"] * COUNT.get(name, 1)
    with torch.no_grad():
        assert torch.equal(compiled(x)[0], layer(x)[0])
    assert operations(graphs[-1]) == [f"fixpoint.{kind}"] * COUNT.get(name, 1)


def test_both_passes_are_whole_where_the_backward_is_compiled_too():
    torch.manual_seed(0)
    layer, x = ERNN(3, 5), torch.randn(6, 2, 3, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = [x, *layer.parameters()]
    plain, fast = (torch.autograd.grad(f(x)[0].square().sum(), inputs) for f in (layer, compiled))
    assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True))


def test_a_graph_does_not_grow_with_the_time_steps():
    layer, sizes = ERNN(3, 5), []
    for T in (4, 64):
        graphs = []
        torch._dynamo.reset()
        torch.compile(layer, fullgraph=True, backend=recorded(graphs))(torch.randn(T, 2, 3))
        sizes.append(len(graphs[0].graph.nodes))
    assert sizes[0] == sizes[1]


def test_a_transform_inside_takes_the_plain_loop():
    layer, x = FastRNN(3, 5), torch.randn(4, 2, 3)
    torch._dynamo.reset()

    def gradient(x):
        return torch.func.grad(lambda x: layer(x)[0].square().sum())(x)

    compiled = torch.compile(gradient, backend="eager")
    torch.testing.assert_close(compiled(x), gradient(x))
