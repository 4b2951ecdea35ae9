"""The gradient of a batch is the sum of those of its samples, each as it is alone."""

import pytest
import torch

from fixpoint import FixedPoint, Implicit, Phantom, Unrolled, make_solver

SOLVERS = ["picard", "anderson", "broyden", "barzilai-borwein", "newton"]
BACKWARDS = [Unrolled(), Unrolled(last=3), Implicit(on_failure="ignore"), Phantom(2)]


def tanh_problem(seed, dtype):
    """W, x, z0 of z = tanh(z W^T + x) for 8 samples that take from 0 to many updates."""
    generator = torch.Generator().manual_seed(seed)
    D = 1 + seed % 3
    W = torch.randn(D, D, generator=generator, dtype=torch.float64)
    W = 0.7 * W / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(8, D, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(-3, 1, 8, dtype=torch.float64)[:, None]
    z0 = torch.zeros_like(x)
    for _ in range(200):  # two samples start at their solution
        z0[-2:] = torch.tanh(z0[-2:] @ W.T + x[-2:])
    return [part.to(dtype) for part in (W, x, z0)]


def weight_gradient(layer, W, x, z0):
    W = W.clone().requires_grad_()
    z = layer(lambda z: torch.tanh(z @ W.T + x), z0).z
    return torch.autograd.grad(z.square().sum(), W)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backward", BACKWARDS, ids=repr)
@pytest.mark.parametrize("name", SOLVERS)
def test_the_gradient_of_a_batch_is_the_sum_of_those_of_its_samples(name, backward, dtype):
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    solver = make_solver(name, rtol=tolerance, atol=0.0, max_iter=100)
    layer = FixedPoint(solver, backward, on_failure="ignore")
    for seed in (0, 2):  # D = 1 and D = 3
        W, x, z0 = tanh_problem(seed, dtype)
        together = weight_gradient(layer, W, x, z0)
        parts = [weight_gradient(layer, W, x[i : i + 1], z0[i : i + 1]) for i in range(8)]
        single = torch.stack(parts)
        assert together.isfinite().all() == single.isfinite().all()
        # Products over one row and over eight are rounded in another order.
        error = (together - single.sum(0)).abs().max() / single.abs().sum(0).max()
        assert error < 1e3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("check_every", [1, 4])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_sample_that_is_done_first_spoils_no_weight(name, check_every):
    # Alone each has a finite gradient; the first one takes a fraction of the second's updates.
    for w, pair in ((-0.7, (0.02, 1.0)), (-0.9, (0.01, 1.0))):
        W = torch.tensor([[w]])
        x = torch.tensor(pair)[:, None]
        solver = make_solver(name, rtol=1e-6, atol=0.0, max_iter=200, check_every=check_every)
        layer = FixedPoint(solver, Unrolled(), on_failure="ignore")
        together = weight_gradient(layer, W, x, torch.zeros(2, 1))
        single = [weight_gradient(layer, W, x[i : i + 1], torch.zeros(1, 1)) for i in range(2)]
        assert torch.allclose(together, single[0] + single[1], rtol=1e-4, atol=0)
