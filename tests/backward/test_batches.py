"""The gradient of a batch is the sum of those of its samples, each as it is alone."""

import pytest
import torch

from fixpoint import FixedPoint, Unrolled, make_solver

SOLVERS = ["picard", "anderson", "broyden", "barzilai-borwein", "newton"]


def weight_gradient(layer, W, x, z0):
    W = W.clone().requires_grad_()
    z = layer(lambda z: torch.tanh(z @ W.T + x), z0).z
    return torch.autograd.grad(z.square().sum(), W)[0]


@pytest.mark.parametrize("check_every", [1, 4])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_sample_that_is_done_first_spoils_no_weight(name, check_every):
    # Alone each has a finite gradient; the first one takes a fraction of the second's updates.
    for w, pair in ((-0.7, (0.02, 1.0)), (-0.9, (0.01, 1.0))):
        W = torch.tensor([[w]])
        x = torch.tensor(pair)[:, None]
        solver = make_solver(name, rtol=1e-6, atol=0.0, max_iter=200, check_every=check_every)
        layer = FixedPoint(solver, Unrolled())
        together = weight_gradient(layer, W, x, torch.zeros(2, 1))
        single = [weight_gradient(layer, W, x[i : i + 1], torch.zeros(1, 1)) for i in range(2)]
        assert torch.allclose(together, single[0] + single[1], rtol=1e-4, atol=0)
