"""What runs on any device: the same code on the CPU, and on a CUDA device where there is one."""

import contextlib

import pytest
import torch
from torch.func import functional_call

from fixpoint import Anderson, FixedPoint, Implicit, InexactNewton, Phantom, Picard, Unrolled
from fixpoint.models import ERNN, UGRNN, FastGRNN, FastRNN
from fixpoint.sequence import LeakyJacobian, solve_sequence
from fixpoint.solvers import SOLVERS, make_solver

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES, ids=["cpu", "cuda"])
def device(request):
    return request.param


@contextlib.contextmanager
def no_sync(device):
    """Raise where the host waits for a CUDA device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sample(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def solve_on(device, solver, backward):
    """The solution of a tanh layer and the gradients of its weights and input."""
    U, x = sample(5, 5), sample(6, 5, seed=1)
    U = 0.7 * U / torch.linalg.matrix_norm(U, 2)
    U, x = (v.to(device).requires_grad_() for v in (U, x))
    layer = FixedPoint(solver, backward).to(device)
    solution = layer(lambda z: torch.tanh(z @ U.mT + x), torch.zeros_like(x))
    weights = sample(6, 5, seed=2).to(device)
    return solution, torch.autograd.grad(solution.z, [U, x], weights)


@pytest.mark.parametrize(
    "backward", [Implicit(), Unrolled(), Unrolled(last=2), Phantom()], ids=repr
)
@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "inexact-newton"])
def test_the_shapes_of_a_solve_on_the_meta_device(name, backward):
    solver = make_solver(name)
    if not solver.unrollable and isinstance(backward, Unrolled):
        pytest.skip("it has no gradient of its updates")
    w = torch.ones(3, device="meta", requires_grad=True)
    z0 = torch.zeros(2, 3, device="meta")
    solution = FixedPoint(solver, backward)(lambda z: torch.tanh(w * z + 1), z0)
    solution.z.sum().backward()
    assert solution.z.is_meta
    assert solution.z.shape == (2, 3)
    assert w.grad.shape == (3,)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solve_to_a_tolerance(name, device):
    options = {"max_iter": 400, "rtol": 1e-9, "atol": 0.0}
    if name == "inexact-newton":
        options |= {"eta": 0.7, "learn": False}
    solution, gradients = solve_on(device, SOLVERS[name](**options), Implicit())
    tensors = solution.z, solution.residual, solution.iterations, solution.result, *gradients
    assert {v.device.type for v in tensors} == {device.type}
    solution.check()
    expected, others = solve_on(
        torch.device("cpu"), Picard(max_iter=500, rtol=1e-13, atol=0), Implicit()
    )
    for g, e in zip((solution.z, *gradients), (expected.z, *others), strict=True):
        torch.testing.assert_close(g.detach().cpu(), e.detach(), rtol=0, atol=1e-6)


def test_a_fixed_number_of_steps_does_not_wait_for_the_device(device):
    solver = Picard(max_iter=5, rtol=0.0, atol=0.0)
    solve_on(device, solver, Unrolled())  # compile, and allocate
    U = (0.1 * sample(5, 5)).to(device).requires_grad_()
    z0 = torch.zeros(6, 5, dtype=U.dtype, device=device)
    layer = FixedPoint(solver, Unrolled())
    with no_sync(device):
        z = layer(lambda z: torch.tanh(z @ U.mT + 1), z0).z
        (gradient,) = torch.autograd.grad(z.sum(), U)
    assert gradient.device.type == device.type


LAYERS = {
    "leaky": lambda **o: ERNN(3, 8, rank=2, **o),
    "leaky, eta of each step": lambda **o: ERNN(3, 8, timesteps=6, max_iter=2, **o),
    "FastRNN": lambda **o: FastRNN(3, 8, **o),
    "FastGRNN": lambda **o: FastGRNN(3, 8, **o),
    "UGRNN": lambda **o: UGRNN(3, 8, num_layers=2, bidirectional=True, **o),
    "Picard": lambda **o: ERNN(
        3, 8, map="self-feedback", solver=Picard(rtol=1e-5), backward=Implicit(), **o
    ),
    "Anderson": lambda **o: ERNN(
        3, 8, map="self-feedback", solver=Anderson(rtol=1e-5), backward=Implicit(), **o
    ),
    "fixed eta": lambda **o: ERNN(
        3,
        8,
        map="identity-feedback",
        solver=InexactNewton(400, eta=0.7, learn=False, rtol=1e-5),
        backward=Implicit(on_failure="ignore"),
        **o,
    ),
}


def run_layer(layer, device, dtype=torch.float32):
    """Output and gradients of all parameters, on the CPU."""
    layer = layer.to(device, dtype)
    x = sample(6, 4, 3).to(device, dtype)
    output, h_n = layer(x)
    assert {output.device.type, h_n.device.type} == {device.type}
    weights = sample(*output.shape, seed=2).to(device)
    gradients = torch.autograd.grad((output * weights).sum(), list(layer.parameters()))
    assert all(g.device.type == device.type and g.dtype == dtype for g in gradients)
    return [v.detach().double().cpu() for v in (output, *gradients)]


# Some samples of "fixed eta" miss its tolerance.
@pytest.mark.filterwarnings("ignore::fixpoint.ConvergenceWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_its_reference_on_the_cpu(name, device):
    torch.manual_seed(0)
    reference = LAYERS[name](implementation="reference")
    layer = LAYERS[name]()
    layer.load_state_dict(reference.state_dict())
    got = run_layer(layer, device)
    expected = run_layer(reference, torch.device("cpu"), torch.float64)
    rtol = 1e-3 if isinstance(layer, ERNN) and layer.fixed_point.solver.has_tolerance else 1e-5
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=rtol * max(1.0, e.abs().max().item()))


@pytest.mark.parametrize("name", ["leaky", "FastGRNN", "Picard"])
def test_autocast_to_bfloat16(name, device):
    """States and gradients in float32, to the digits of bfloat16."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    expected = run_layer(layer, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = run_layer(layer, device)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=0.05 * max(1.0, e.abs().max().item()))


@pytest.mark.parametrize("jacobian", [LeakyJacobian(0.9), "dense"], ids=["leaky", "dense"])
def test_a_sequence_at_once(jacobian, device):
    V, x = (0.4 * sample(4, 4)).to(device).requires_grad_(), sample(20, 3, 4, seed=1).to(device)
    h0 = torch.zeros(3, 4, dtype=x.dtype, device=device)

    def step(h, x):
        return torch.lerp(h, torch.tanh(h @ V.mT + x), 0.1)

    solution = solve_sequence(step, x, h0, jacobian=jacobian, rtol=1e-10)
    (gradient,) = torch.autograd.grad(solution.z.sum(), V)
    assert solution.z.device.type == gradient.device.type == device.type
    h, states = h0, []
    for t in range(20):
        h = step(h, x[t])
        states.append(h)
    expected = torch.stack(states)
    torch.testing.assert_close(solution.z, expected, rtol=0, atol=1e-8)
    (other,) = torch.autograd.grad(expected.sum(), V)
    torch.testing.assert_close(gradient, other, rtol=0, atol=1e-6)


def test_parallel_time_of_a_layer(device):
    torch.manual_seed(0)
    layer = ERNN(3, 8, rank=2, time="parallel").to(device)
    x = sample(30, 2, 3).float().to(device)
    expected = ERNN(3, 8, rank=2)
    expected.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x)[0].cpu(), expected(x.cpu())[0], rtol=1e-4, atol=1e-5)


def test_a_state_of_a_device_serves_on_the_cpu(device, tmp_path):
    torch.manual_seed(0)
    layer = FastGRNN(3, 8).to(device)
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    there = torch.load(tmp_path / "weights.pt", map_location="cpu")
    x = sample(6, 4, 3).float()
    got = functional_call(FastGRNN(3, 8), there, (x,))[0]
    torch.testing.assert_close(got, layer(x.to(device))[0].cpu(), rtol=1e-5, atol=1e-5)


def test_a_training_and_its_weights_on_the_cpu(device, tmp_path):
    """Trained by Fabric on one device, then loaded and run on the CPU."""
    pytest.importorskip("lightning_fabric")
    from fixpoint.training import Recipe, load_trained
    from fixpoint.training.commands.single_run import train_recipe

    recipe = Recipe().changed(hidden=5, epochs=1, device=device.type)
    train_recipe(recipe, tmp_path, lambda epoch: None)
    trained = load_trained(tmp_path / recipe.key)
    weights = list(trained.model.parameters())
    assert {w.device.type for w in weights} == {"cpu"}
    assert all(w.isfinite().all() for w in weights)
    assert trained.model(trained.data.inputs(trained.data.x_test[:4])).shape[0] == 4
