"""By-products of phi: `has_aux=True` of `solve`, `FixedPoint`, `solve_root` and `Root`."""

import pytest
import torch

from fixpoint import FixedPoint, Newton, Root, Unrolled, solve, solve_root

TIGHT = {"rtol": 1e-13, "atol": 1e-14, "max_iter": 200}
X = torch.tensor([[0.3, -0.2], [1.0, 0.5]], dtype=torch.float64)


def phi_of(a, x):
    return lambda z: (torch.tanh(a * z + x), {"heat": a * z, "name": "kept"})


def test_aux_belongs_to_the_solution():
    solution = solve(phi_of(0.5, X), torch.zeros_like(X), has_aux=True)
    assert torch.equal(solution.aux["heat"], 0.5 * solution.z)
    assert solution.aux["name"] == "kept"
    assert not solution.aux["heat"].requires_grad
    without = solve(lambda z: phi_of(0.5, X)(z)[0], torch.zeros_like(X))
    assert without.aux is None
    assert solution.evaluations == without.evaluations + 1
    root = solve_root(lambda z: (z - 2, z + 1), torch.zeros(1, 1), has_aux=True)
    assert root.aux.item() == pytest.approx(3)


@pytest.mark.parametrize("layer", [FixedPoint(), FixedPoint("picard", Unrolled()), Root(Newton())])
def test_gradient_of_aux(layer):
    def heat(a, x):
        def F(z):
            fz, aux = phi_of(a, x)(z)
            return (fz - z if isinstance(layer, Root) else fz), aux

        return layer(F, torch.zeros_like(x), has_aux=True, **TIGHT).aux["heat"]

    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(heat, (a, X.clone().requires_grad_()))
    assert torch.autograd.gradgradcheck(heat, (a, X.clone().requires_grad_()))


def test_a_phi_without_pair_is_refused():
    with pytest.raises(TypeError, match="phi must return a pair"):
        solve(torch.cos, torch.zeros(1, 1), has_aux=True)
