"""Iterations by Jacobian, and the bound of the leaky iteration on a trained layer."""

import pytest
import torch

from fixpoint.analysis import parallel_iterations
from fixpoint.data import load_dataset
from fixpoint.models import ERNN, FastGRNN
from fixpoint.sequence import leaky_error_bound, solve_sequence


def trained(x, y):
    """An ERNN after a few steps of Adam on the sample of HAR-2."""
    torch.manual_seed(0)
    layer, head = ERNN(9, 16, timesteps=128, batch_first=True), torch.nn.Linear(16, 2)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(layer.last_output(x)), y).backward()
        optimizer.step()
    return layer


def test_the_bound_holds_on_a_trained_layer():
    data = load_dataset("har2-sample")
    x, y = data.x_train[:32].float(), data.y_train[:32]
    layer, x = trained(x, y).double(), x[:4].double()
    found = parallel_iterations(layer, x, [8, 16], jacobians=["leaky"])
    assert (found.iterations["leaky"] <= found.bound).all()
    cell, x = layer.l0, x.transpose(0, 1)
    h0 = torch.zeros(4, 16, dtype=torch.float64)
    with torch.no_grad():
        weights, form = cell.recurrence(128), cell.parallel_form(x, h0)
        decay, b = weights.a.flatten(), weights.b.flatten()
        bound = leaky_error_bound(decay, b.abs() * torch.linalg.matrix_norm(weights.A, 2), 12)
        exact = cell.states(x, h0, last_only=False)
        for i in (1, 3, 6, 12):
            z = solve_sequence(form.step, form.x, h0, decay=decay, rtol=0.0, atol=0.0, max_iter=i).z
            error, start = (z - exact).norm(dim=2), exact.norm(dim=2).amax(0)
            assert (error <= bound[i, :, None] * start + 1e-12).all()
            assert error.max() > 0  # the iteration has not ended


def test_the_bound_is_the_tail_of_the_binomial():
    bound = leaky_error_bound(torch.full((9,), 0.7), torch.full((9,), 0.3 * 2.0), 8)
    binomial = torch.distributions.Binomial(8, torch.tensor(0.3))
    tail = binomial.log_prob(torch.arange(9.0)).exp().flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(bound[:, -1], tail * 2.0 ** torch.arange(9.0))


def test_other_recurrences_are_refused():
    with pytest.raises(TypeError, match="FastGRNN"):
        parallel_iterations(FastGRNN(9, 4), torch.randn(8, 2, 9), [8])
