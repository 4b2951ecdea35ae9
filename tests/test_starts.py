"""The best of several starts for each sample."""

import pytest
import torch

from fixpoint import (
    Anderson,
    FixedPoint,
    Implicit,
    Newton,
    Phantom,
    Picard,
    Root,
    Unrolled,
    multi_start,
    solve,
)

D = torch.float64
TIGHT = {"rtol": 1e-13, "atol": 1e-14, "max_iter": 200}
X = torch.tensor([[0.3, -0.1], [-0.2, 0.4], [0.1, 0.2]], dtype=D)
STARTS = torch.stack([torch.full_like(X, value) for value in (30.0, -2.0, 2.0)])


def wells(a, x):
    """Fixed points near -1, 0 and 1; from 30 it runs away."""
    return lambda z: torch.where(z.abs() > 10, 2 * z, z + a * (z - z**3 + x) / 4)


def test_each_sample_takes_the_start_of_least_residual():
    layer = FixedPoint(Picard(**TIGHT))
    solution = multi_start(wells(1.0, X), STARTS, layer)
    single = [solve(wells(1.0, X), start, layer.solver) for start in STARTS]
    residuals = torch.stack([s.residual for s in single])
    assert torch.equal(solution.start, residuals.argmin(0))
    assert solution.converged.all()
    assert not single[0].converged.any()
    for row, start in enumerate(solution.start.tolist()):
        assert torch.equal(solution.z[row], single[start].z[row])
        assert solution.iterations[row] == single[start].iterations[row]


def test_another_choice():
    def right(z, residual):
        assert z.shape == (3, *X.shape)
        assert residual.shape == (3, 3)
        return torch.where(residual <= 1, z.sum(2), -torch.inf).argmax(0)

    solution = multi_start(wells(1.0, X), STARTS, FixedPoint(Picard(**TIGHT)), select=right)
    assert solution.start.tolist() == [2, 2, 2]
    assert (solution.z > 0.5).all()


@pytest.mark.parametrize(
    "layer",
    [
        FixedPoint(Anderson(**TIGHT), Implicit()),
        Root(Newton(**TIGHT)),
        FixedPoint(Picard(**TIGHT), Phantom(90)),
    ],
    ids=["Implicit", "Root", "Phantom"],
)
def test_gradients(layer):
    def z_of(a, x):
        phi = wells(a, x)
        F = (lambda z: phi(z) - z) if isinstance(layer, Root) else phi
        return multi_start(F, STARTS[1:], layer).z

    inputs = torch.tensor(0.7, dtype=D, requires_grad=True), X.clone().requires_grad_()
    assert torch.autograd.gradcheck(z_of, inputs, fast_mode=True)


def test_trees_groups_and_no_batch():
    A = torch.block_diag(torch.full((2, 2), 0.2), torch.tensor([[0.5]])).double()
    x = torch.tensor([1.0, 2.0, 3.0], dtype=D)

    def phi(z):
        return {"a": A @ z["a"] + x, "b": z["b"] / 2 + z["a"][:, None] / 4}

    starts = {"a": torch.randn(4, 3, dtype=D), "b": torch.zeros(4, 3, 2, dtype=D)}
    layer = FixedPoint(Picard(**TIGHT))
    groups = torch.tensor([0, 0, 1])
    grouped = multi_start(phi, starts, layer, groups=groups)
    assert grouped.start.shape == grouped.result.shape == (2,)
    whole = multi_start(phi, starts, layer, batched=False)
    assert whole.start.shape == whole.result.shape == (1,)
    exact = torch.linalg.solve(torch.eye(3, dtype=D) - A, x)
    for solution in (grouped, whole):
        torch.testing.assert_close(solution.z["a"], exact)
        torch.testing.assert_close(solution.z["b"], exact[:, None].expand(3, 2) / 2)


def test_what_cannot_be_chosen():
    with pytest.raises(TypeError, match="differentiates the updates of one solve"):
        multi_start(torch.cos, torch.zeros(2, 1, 1), FixedPoint("picard", Unrolled()))
    with pytest.raises(ValueError, match="measures no residual"):
        multi_start(torch.cos, torch.zeros(2, 1, 1), FixedPoint(Picard(rtol=0.0, atol=0.0)))
    with pytest.warns(UserWarning, match="1 STALLED"):
        multi_start(lambda z: z + 1, torch.zeros(2, 1, 1))


def test_what_phi_makes_once_and_keeps_has_its_gradient():
    """z* = 1 / (1 - a), where phi makes its weight at its first evaluation, that of the search."""
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    kept = []

    def phi(z):
        if not kept:
            kept.append(a * 1)
        return kept[0] * z + 1

    multi_start(phi, torch.zeros(3, 1, 1, dtype=torch.float64)).z.sum().backward()
    torch.testing.assert_close(a.grad.item(), 4.0, rtol=1e-4, atol=0.0)
