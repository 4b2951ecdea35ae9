"""fixpoint.rows: whether samples depend on each other, and which."""

import pytest
import torch

from fixpoint import ConvergenceError, Picard, Stall, check_rows, solve
from fixpoint.rows import NOISE


def test_independent_samples():
    linear = torch.nn.Linear(4, 4)
    for z in (torch.zeros(5, 4), torch.randn(1, 4), torch.zeros(0, 4), {"a": torch.ones(3, 4)}):
        key = (lambda z: z["a"]) if isinstance(z, dict) else (lambda z: z)
        back = (lambda x: {"a": x}) if isinstance(z, dict) else (lambda x: x)
        found = check_rows(lambda z, k=key, b=back: b(torch.tanh(linear(k(z)))), z)
        assert found.independent
        assert "independent" in found.describe()
    assert NOISE > 1


def test_samples_that_depend_on_others_are_named():
    A = torch.zeros(7, 7)
    A[5, 2] = 0.3  # sample 5 reads sample 2
    found = check_rows(lambda z: 0.5 * z + A @ z, torch.zeros(7, 3))
    assert found.coupled.tolist() == [i == 5 for i in range(7)]
    assert "1 of 7 samples depend on others (5)" in found.describe()
    assert "batched=False" in found.describe()
    norm = torch.nn.BatchNorm1d(3)
    assert check_rows(norm, torch.randn(4, 3)).coupled.all()
    assert check_rows(norm.eval(), torch.randn(4, 3)).independent


def test_a_random_map_and_a_sample_that_is_not_finite():
    assert not check_rows(lambda z: torch.dropout(z, 0.5, True), torch.ones(3, 50)).repeats
    x = torch.tensor([[1.0], [float("nan")]])
    assert check_rows(lambda z: 0.5 * z + x, torch.zeros(2, 1)).independent


def test_a_coupled_sample_that_stalls_is_told_of_check_rows():
    """The rows of a z0 without a batch axis are samples; here they turn around each other."""
    A, ones = torch.tensor([[0.0, -1.2], [1.2, 0.0]]), torch.ones(2)
    solution = solve(lambda z: A @ z + ones, torch.zeros(2), Picard(max_iter=20))
    assert (solution.stall == Stall.NO_PROGRESS).all()
    with pytest.raises(ConvergenceError, match=r"check_rows`\), pass batched=False"):
        solution.check()
    assert solve(lambda z: A @ z + ones, torch.zeros(2), batched=False).converged.all()
