"""Trees: each leaf converges by itself; complex leaves; starts made in inference mode."""

import pytest
import torch

from fixpoint import (
    SOLVERS,
    Anderson,
    FixedPoint,
    Implicit,
    Phantom,
    Picard,
    SciPySolver,
    Unrolled,
    make_solver,
    solve,
)

NAMES = [name for name in SOLVERS if name != "inexact-newton"]
ZERO = torch.zeros(1, 1, dtype=torch.float64)


def in_different_units(z):
    """Fixed points 1e5 and 2e-6."""
    return 0.5 * z[0] + 5e4, 0.9 * z[1] + 2e-7


@pytest.mark.parametrize("check_every", [1, 5])
@pytest.mark.parametrize("name", NAMES)
def test_each_leaf_converges_by_itself(name, check_every):
    solver = make_solver(name, rtol=1e-8, atol=0.0, max_iter=500, check_every=check_every)
    solution = solve(in_different_units, (ZERO, ZERO), solver)
    assert solution.converged.all()
    assert solution.z[0].item() == pytest.approx(1e5, rel=1e-6)
    assert solution.z[1].item() == pytest.approx(2e-6, rel=1e-6)
    assert solution.residual.shape == (1,)


def test_scipy_is_judged_by_leaf_too():
    solver = SciPySolver("hybr", rtol=1e-8, atol=0.0, max_iter=200)
    solution = solve(in_different_units, (ZERO, ZERO), solver)
    assert solution.z[1].item() == pytest.approx(2e-6, rel=1e-6)


def test_atol_of_each_leaf():
    solver = Picard(rtol=0.0, leaf_atol=(1.0, 1e-12), max_iter=500, record="iterates")
    solution = solve(in_different_units, (ZERO, ZERO), solver)
    residuals = [
        torch.cat(in_different_units(z.split(1, 1)), 1) - z for z in solution.trace.iterates
    ]
    expected = [max(abs(a), abs(b) / 1e-12) for a, b in (g[0].tolist() for g in residuals)]
    assert torch.allclose(solution.trace.residual[:, 0], torch.tensor(expected).double())
    assert solution.converged.all()
    for z0 in (ZERO, (ZERO, ZERO, ZERO)):
        with pytest.raises(ValueError, match="leaf_atol needs one value for each tensor of z0"):
            solve(lambda z: z, z0, solver)
    with pytest.raises(ValueError, match="leaf_atol must be a finite number >= 0"):
        Picard(leaf_atol=(-1.0,))
    assert Picard(rtol=0.0, atol=0.0, leaf_atol=(1.0,)).has_tolerance


def test_a_leaf_without_numbers_or_at_rest_is_solved():
    z0 = (torch.zeros(2, 0), torch.zeros(2, 1), torch.zeros(2, 2))
    solution = solve(lambda z: (z[0], 0 * z[1], z[2].cos()), z0, Anderson(atol=0.0))
    assert solution.converged.all()


def test_gradients_of_trees_with_leaves_of_their_own_size():
    a = torch.tensor([0.5, 0.9], dtype=torch.float64, requires_grad=True)

    def solved(a):
        solver = Anderson(rtol=1e-13, atol=0.0, max_iter=200)
        z0 = (torch.zeros(2, 1).double(), torch.zeros(2, 3).double())
        z = FixedPoint(solver)(lambda z: (a[0] * z[0] + 1e3, a[1] * z[1] + 1e-3), z0).z
        return z[0], z[1]

    assert torch.autograd.gradcheck(solved, (a,), eps=1e-6, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_complex_states(name):
    z0 = torch.zeros(2, 3, dtype=torch.complex128)
    solver = make_solver(name, rtol=1e-13, atol=0.0, max_iter=200)
    assert torch.allclose(solve(lambda z: 0.5j * z + 1, z0, solver).z, z0 + 0.8 + 0.4j)
    a = torch.tensor(0.3 + 0.5j, dtype=torch.complex128, requires_grad=True)

    def solved(a):
        layer = FixedPoint(solver, Implicit(make_solver("newton", rtol=1e-12, atol=0.0)))
        return layer(lambda z: a * z.conj() / 2 + a * z + 1, z0).z[0]

    assert torch.autograd.gradcheck(solved, (a,))
    if name in ("anderson", "newton"):
        assert torch.autograd.gradgradcheck(solved, (a,))


@pytest.mark.parametrize("shape", [(0, 3), (0,), (2, 0)])
@pytest.mark.parametrize("backward", [Implicit(), Unrolled(), Phantom()])
def test_complex_states_without_numbers(shape, backward):
    z0 = torch.zeros(shape, dtype=torch.complex64)
    a = torch.ones((), requires_grad=True)
    solution = FixedPoint("anderson", backward)(lambda z: a * z.cos() / 2, z0).check()
    assert solution.z.shape == shape
    assert solution.z.dtype == z0.dtype
    if solution.z.requires_grad:
        solution.z.abs().sum().backward()
        assert a.grad == 0


def test_second_derivatives_by_complex_and_real_parameters():
    z0 = torch.zeros(2, 3, dtype=torch.complex128)
    a = torch.tensor(0.3 + 0.5j, dtype=torch.complex128, requires_grad=True)
    b = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    newton = make_solver("newton", rtol=1e-13, atol=0.0)

    def solved(a, b):
        layer = FixedPoint(newton, Implicit(newton))
        return layer(lambda z: a * z.conj() / 2 + a * z * b + b, z0).z[0]

    assert torch.autograd.gradcheck(solved, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(solved, (a, b))


def test_complex_and_real_leaves_together():
    z0 = {"z": torch.zeros(2, dtype=torch.complex64), "x": torch.zeros(2, 3)}

    def phi(tree):
        return {"z": 0.5j * tree["z"] + 1, "x": 0.5 * tree["x"] + tree["z"].real[:, None]}

    for solver in (Anderson(), make_solver("newton")):
        solution = solve(phi, z0, solver)
        assert solution.z["z"].dtype == torch.complex64
        assert torch.allclose(solution.z["z"], torch.full((2,), 0.8 + 0.4j), atol=1e-4)
        assert torch.allclose(solution.z["x"], torch.full((2, 3), 1.6), atol=1e-3)


def test_a_complex_map_of_a_real_start_says_to_start_complex():
    with pytest.raises(TypeError, match=r"float32; it returned torch.complex64.*start from a z0"):
        solve(lambda z: 0.5j * z + 1, torch.zeros(1, 1))


@pytest.mark.parametrize("shape", [(2, 3), (2, 1, 3)])
@pytest.mark.parametrize("backward", [Implicit(), Phantom(), Unrolled(last=2), Unrolled()])
def test_a_start_made_in_inference_mode_can_be_trained_from(backward, shape):
    with torch.inference_mode():
        z0 = FixedPoint()(lambda z: 0.5 * z + 1, torch.zeros(shape)).z
        if isinstance(backward, Unrolled) and backward.last is None:
            z0 = z0 + 1  # needs an update to have a gradient
    a = torch.tensor(0.5, requires_grad=True)
    FixedPoint(Anderson(), backward)(lambda z: a * z + 1, z0).z.sum().backward()
    assert a.grad > 0


def test_a_map_that_returns_another_kind_of_tree():
    z0 = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"given, a tensor; it returned \(tensor, tensor"):
        solve(lambda z: (z, z), z0)
    with pytest.raises(ValueError, match=r"given, \{'a': tensor\}; it returned a tensor"):
        solve(lambda z: z["a"], {"a": z0})


def test_a_solution_has_memory_of_its_own():
    y = torch.ones(2, 1)
    solutions = [solve(lambda z: y, torch.zeros(2, 1)).z, solve(lambda z: y, y, "picard").z]
    solutions.append(FixedPoint()(lambda z: y, y).z)
    for z in solutions:
        z += 1
    assert y.tolist() == [[1.0], [1.0]]
