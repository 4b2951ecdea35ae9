"""The equilibrium manifold: what its exact solution keeps of the past."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.functional import jacobian

from fixpoint import Anderson, Implicit, InexactNewton, Picard, Unrolled
from fixpoint.models import ERNN, ManifoldMap

EPS = 2.0**-52


def draw(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(implementation="auto", *, solver=Anderson, rtol=1e-13, **options):
    torch.manual_seed(0)
    cell = ManifoldMap(3, 5, bound=0.7, **options)
    torch.nn.init.normal_(cell.b, std=0.5)
    solve = solver(max_iter=200, rtol=rtol, atol=0.1 * rtol)
    backward = Implicit(Anderson(max_iter=200, rtol=rtol, atol=0.1 * rtol))
    made = ERNN(3, 5, map=cell, solver=solve, backward=backward, implementation=implementation)
    return made.double().eval()


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("gamma", [0.9, 1.0, 3.0])
def test_an_exact_step_keeps_the_past_with_its_sign_changed(implementation, gamma):
    """gamma s = sigma(U s + W x + b) has no h_{t-1} in it, so d h_t / d h_{t-1} = -I."""
    made = layer(implementation, gamma=gamma)
    x, h0 = draw(4, 1, 3), draw(1, 1, 5, seed=2)
    for T in (1, 4):
        found = jacobian(lambda h, T=T: made(x[:T], h)[1], h0).reshape(5, 5)
        expected = (-1) ** T * torch.eye(5, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_all_time_steps_at_once_are_the_loop():
    """Also in gradients, and against NumPy: gamma (h_t + h_{t-1}) = tanh(U s_t + W x_t + b)."""
    fast, plain = layer("fused", gamma=1.3), layer("reference", gamma=1.3)
    assert "not fused" not in repr(fast.l0)
    x, h0 = draw(6, 4, 3), draw(1, 4, 5, seed=2)
    results = []
    for made in (fast, plain):
        leaves = [x.clone().requires_grad_(), h0.clone().requires_grad_()]
        output, h_n = made(*leaves)
        loss = (output * draw(6, 4, 5, seed=3)).sum() + h_n.square().sum()
        results.append([output, h_n, *torch.autograd.grad(loss, [*leaves, *made.map.parameters()])])
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-10)
    cell, h = fast.map, results[0][0].detach()
    U, W, b = (value.detach().numpy() for value in (cell.U, cell.W, cell.b))
    s = (h + torch.cat([h0, h[:-1]])).numpy()
    np.testing.assert_allclose(1.3 * s, np.tanh(s @ U.T + x.numpy() @ W.T + b), rtol=0, atol=1e-11)


@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_gradients(implementation):
    made = layer(implementation)
    weights = [value.requires_grad_() for value in (made.map.W, made.map.b)]

    def states(x, h0, *_):
        return made(x, h0)[0]

    inputs = (draw(3, 2, 3).requires_grad_(), draw(1, 2, 5, seed=2).requires_grad_(), *weights)
    assert gradcheck(states, inputs, fast_mode=True)
    assert gradgradcheck(states, inputs, atol=1e-4, fast_mode=True)


def test_a_row_with_nan_is_lost_alone_and_each_solve_is_reported():
    made = layer(solver=Picard)
    x = draw(5, 3, 3)
    whole = made.trajectory(x)
    x[2, 1, 0] = torch.nan
    path = made.trajectory(x)
    assert path.output[2:, 1].isnan().all()
    assert torch.equal(path.output[:, [0, 2]], whole.output[:, [0, 2]])
    assert path.iterations.shape == path.result.shape == path.residual.shape == (5, 3)
    assert whole.iterations.max() > 5


def test_few_steps_are_the_loop_of_the_formula():
    """h + eta (phi - h), K times from h_{t-1}: no equilibrium, and not fused."""
    cell = ManifoldMap(3, 5, gamma=2.0, nonlinearity="relu").double()
    made = ERNN(3, 5, map=cell, solver=InexactNewton(2, eta=0.125), backward=Unrolled()).double()
    assert "ManifoldMap" in repr(made.l0)
    x, h = draw(4, 1, 3), np.zeros(5)
    U, W, b = (value.detach().numpy() for value in (cell.U, cell.W, cell.b))
    for x_t in x[:, 0].numpy():
        past = h
        for _ in range(2):
            h = h + 0.125 * (np.maximum(U @ (h + past) + W @ x_t + b, 0) / 2 - past - h)
    np.testing.assert_allclose(made(x)[1][0, 0].detach().numpy(), h, rtol=100 * EPS)


def test_a_subclass_with_another_phi_is_solved_by_the_loop():
    class Shifted(ManifoldMap):
        def bind(self, x):
            at = super().bind(x)
            return lambda t, past: lambda h: at(t, past)(h) + 1

    cell = Shifted(3, 5, bound=0.5).double().eval()
    made = ERNN(3, 5, map=cell, solver=Anderson(rtol=1e-12, atol=0), backward=Implicit())
    x = draw(1, 1, 3)
    h = made.double()(x)[1][0].detach()
    torch.testing.assert_close(h, cell(h, torch.zeros_like(h), x[0]).detach())


@pytest.mark.parametrize("gamma", [0.0, -1.0, float("nan")])
def test_gamma_is_positive(gamma):
    with pytest.raises(ValueError, match="gamma must be a finite number > 0"):
        ManifoldMap(3, 5, gamma=gamma)
