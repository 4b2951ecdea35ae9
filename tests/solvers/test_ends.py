"""When samples and batches end: `min_iter`, `stop`, `stop_when`, and `noise` in updates."""

import math

import pytest
import torch

from fixpoint import (
    Anderson,
    Auto,
    Broyden,
    FixedPoint,
    Implicit,
    IterativeSolver,
    Newton,
    Picard,
    Result,
    Reversible,
    Unrolled,
    solve,
)

D = torch.float64
RATES = torch.tensor([[0.1], [0.5], [0.8], [0.95]], dtype=D)
Z0 = torch.zeros(4, 1, dtype=D)


def phi(z):
    """Its fixed point is 1; Picard's k-th state is 1 - rate^k."""
    return RATES * z + (1 - RATES)


def names(solution):
    return [Result(code).name for code in solution.result.tolist()]


def test_at_least_a_fraction_updates():
    for solver in (Picard, Anderson, Broyden):
        solution = solve(phi, Z0, solver(min_iter=6, rtol=0.5))
        assert solution.iterations.min() >= 6
        assert solution.converged.all()
    exact = solve(phi, torch.ones_like(Z0), Picard(min_iter=3))
    assert exact.iterations.tolist() == [3] * 4
    plain = solve(phi, Z0, Picard(min_iter=3, max_iter=500))
    assert torch.equal(plain.z, solve(phi, Z0, Picard(max_iter=500)).z)


def test_all_samples_move_until_the_slowest_has_converged():
    rates = torch.tensor([[0.4], [0.5], [0.8]], dtype=D)
    each, together = (
        solve(lambda z: rates * z + 1 - rates, Z0[:3], Picard(rtol=1e-3, stop=stop))
        for stop in ("each", "all")
    )
    count = int(each.iterations.max())
    assert together.iterations.tolist() == [count] * 3
    torch.testing.assert_close(together.z, 1 - rates**count)
    assert together.converged.all()
    assert ((each.z - 1).abs()[:2] > 100 * (together.z - 1).abs()[:2]).all()


def test_a_sample_that_cannot_converge_does_not_hold_the_result_of_others():
    rates = torch.tensor([[0.5], [-1.0]], dtype=D)
    solution = solve(lambda z: rates * z + 1, Z0[:2], Picard(stop="all", max_iter=20))
    assert names(solution) == ["CONVERGED", "STALLED"]
    assert solution.iterations.tolist() == [20, 20]
    lost = torch.tensor([[0.0], [float("nan")]], dtype=D)
    solution = solve(lambda z: 0.5 * z + lost, Z0[:2] + 1, Picard(stop="all"))
    assert names(solution) == ["CONVERGED", "NONFINITE"]


@pytest.mark.parametrize("solver", [Anderson, Newton, Auto])
def test_a_batch_ends_with_a_fraction(solver):
    harder = torch.tensor([[1.0], [1.0], [30.0], [3000.0]], dtype=D)

    def cubic(z):
        return z - (z + z**3 - harder) / 4

    options = {"max_iter": 200, "rtol": 1e-6}
    each = solve(cubic, Z0, solver(**options))
    half = solve(cubic, Z0, solver(stop=0.5, **options))
    assert names(half)[:2] == ["CONVERGED"] * 2
    assert torch.equal(half.iterations[:2], each.iterations[:2])
    count = int(half.iterations[:2].max())
    slow = each.iterations[2:] > count
    assert (half.result[2:][slow] == Result.STOPPED).all()
    assert (half.iterations <= count).all()
    assert slow.any()
    assert torch.equal(solve(cubic, Z0, solver(stop=1.0, **options)).z, each.z)


def test_stopped_samples_have_the_gradient_that_failed_says():
    for failed, count in (("zero", 2), ("keep", 4)):
        b = torch.zeros(4, 1, dtype=D, requires_grad=True)
        adjoint = Implicit(Picard(max_iter=999))
        layer = FixedPoint(Picard(stop=0.5), adjoint, failed=failed, on_failure="ignore")
        solution = layer(lambda z: phi(z) + b, Z0)
        assert names(solution) == ["CONVERGED"] * 2 + ["STOPPED"] * 2
        (found,) = torch.autograd.grad(solution.z.sum(), b)
        torch.testing.assert_close(found[:count], 1 / (1 - RATES)[:count], rtol=1e-3, atol=0)
        assert not found[count:].any()
    with pytest.raises(RuntimeError, match="2 STOPPED"):
        solution.check()


def test_a_test_beyond_the_residual():
    """Accepted where two states differ by 1 %; the error is then rate / (1 - rate) times that."""

    def close(z, fz):
        assert z.shape == fz.shape == (4, 1)
        return (fz - z).abs().amax(1) < 1e-2

    solution = solve(phi, Z0, Picard(rtol=1e-9, stop_when=close))
    assert names(solution) == ["ACCEPTED"] * 4
    assert solution.check() is solution
    steps = (1e-2 / (1 - RATES)).log() / RATES.log()
    assert solution.iterations.tolist() == (steps.floor() + 1).squeeze(1).tolist()
    torch.testing.assert_close(solution.z, 1 - RATES ** solution.iterations[:, None])
    assert (solution.residual > 1).all()
    some = solve(phi, Z0, Picard(stop_when=lambda z, fz: RATES[:, 0] == 0.8))
    assert names(some) == ["CONVERGED", "CONVERGED", "ACCEPTED", "MAX_ITER"]
    assert some.iterations[2] == 0
    a = torch.ones(1, dtype=D, requires_grad=True)
    layer = FixedPoint(
        Picard(rtol=1e-9, stop_when=close), Implicit(Picard(rtol=1e-12, max_iter=999))
    )
    layer(lambda z: a * phi(z), Z0).z.sum().backward()
    assert torch.isfinite(a.grad)
    assert a.grad > 1
    with pytest.raises(TypeError, match="bool for each sample"):
        solve(phi, Z0, Picard(stop_when=lambda z, fz: True))
    with pytest.raises(ValueError, match="bool for each of 4 samples; got 2"):
        solve(phi, Z0, Picard(stop_when=lambda z, fz: torch.ones(2, dtype=torch.bool)))


class Wanders(IterativeSolver):
    """From the solution 0 of phi(z) = z / 2 to 5."""

    def update(self, k, z, fz, state):
        return torch.full_like(z, 0.0 if k == 0 else 5.0), None


def test_a_solution_that_was_left_again():
    start = torch.ones(1, 1)
    kept = solve(lambda z: z / 2, start, Wanders(min_iter=3, max_iter=3))
    assert (names(kept), kept.z.item(), kept.residual.item()) == (["CONVERGED"], 0.0, 0.0)
    last = solve(lambda z: z / 2, start, Wanders(min_iter=3, max_iter=3, keep_best=False))
    assert (names(last), last.z.item()) == (["MAX_ITER"], 5.0)


def test_a_residual_belongs_to_its_state_where_a_sample_moves_on():
    """Its residual swings within the tolerance while its batch-mate is far from its solution."""
    c, s = math.cos(0.7), math.sin(0.7)
    growing = 1.02 * torch.tensor([[c, s / 4], [-4 * s, c]], dtype=D)

    def swings(z):
        return torch.cat((z[:1] @ growing, 0.99 * z[1:] + 1))

    start = torch.tensor([[1e-3, 0.0], [0.0, 0.0]], dtype=D)
    for count in range(5, 60):
        solver = Picard(max_iter=count, rtol=0.0, atol=1e-3, stop="all")
        solution = solve(swings, start, solver)
        residual = (swings(solution.z) - solution.z).square().mean(1).sqrt() / 1e-3
        torch.testing.assert_close(solution.residual, residual)


def test_updates_of_a_solved_sample_do_not_depend_on_its_mates():
    start = torch.tensor([[0.0], [1.0]], dtype=D)
    solver = Broyden(min_iter=4, rtol=1e-5)
    for mate in (torch.cos, lambda z: z + 1, lambda z: z / 0):
        together = solve(lambda z, f=mate: torch.cat((0.5 * z[:1], f(z[1:]))), start, solver)
        assert together.iterations[0] == 4
    assert solve(lambda z: 0.5 * z, start[:1], solver).iterations.tolist() == [4]


@pytest.mark.parametrize("options", [{}, {"stop": "all"}, {"stop": 0.5}, {"min_iter": 4}])
def test_no_samples_need_one_evaluation(options):
    for kind in (Picard, Anderson, Broyden, Newton):
        solution = solve(torch.cos, torch.zeros(0, 3), kind(**options))
        assert (solution.z.shape, solution.evaluations) == ((0, 3), 1)


def test_the_adjoint_ends_by_itself():
    counts = []
    for options in ({}, {"min_iter": 40, "stop": "all", "stop_when": lambda z, fz: z[:, 0] > 2}):
        b = torch.zeros(4, 1, dtype=D, requires_grad=True)
        layer = FixedPoint(Anderson(**options))
        layer(lambda z: phi(z) + b, Z0).z.sum().backward()
        counts.append(layer.backward.adjoint.iterations.tolist())
    assert counts[0] == counts[1]


def test_noise_is_a_part_of_the_update():
    def draw(noise, seed):
        generator = torch.Generator().manual_seed(seed)
        solver = Picard(max_iter=1, rtol=0.0, atol=0.0, noise=noise, generator=generator)
        step = torch.tensor([[2.0], [0.0]], dtype=D)
        return solve(lambda z: z + step, torch.zeros(2, 20000, dtype=D), solver).z

    z = draw(0.1, 0)
    assert torch.equal(z, draw(0.1, 0))
    assert not torch.equal(z, draw(0.1, 1))
    assert z[0].mean().item() == pytest.approx(2, abs=4 * 0.2 / 20000**0.5)
    assert z[0].std().item() == pytest.approx(0.2, rel=0.03)
    assert not z[1].any()  # no update, no noise
    for solver in (Picard, Anderson):
        solution = solve(phi, Z0, solver(noise=0.1, max_iter=500, rtol=1e-8))
        assert solution.converged.all()
        torch.testing.assert_close(solution.z, torch.ones_like(Z0), rtol=0, atol=1e-6)
    layer = FixedPoint(Picard(max_iter=3, rtol=0.0, atol=0.0, noise=0.1), Unrolled())
    b = torch.zeros(4, 1, dtype=D, requires_grad=True)
    layer(lambda z: phi(z) + b, Z0).z.sum().backward()
    torch.testing.assert_close(b.grad, 1 + RATES + RATES**2)  # the noise is a constant
    grouped = solve(
        lambda z: z / 2 + 1,
        torch.zeros(3, 1),
        Picard(noise=0.1, max_iter=200),
        groups=torch.tensor([0, 0, 1]),
    )
    assert grouped.converged.all()


def test_wrong_options():
    for kind in (Broyden, Newton, Auto):
        with pytest.raises(ValueError, match="noise would mislead"):
            kind(noise=0.1)
    with pytest.raises(ValueError, match=r"Reversible repeats updates, and noise"):
        FixedPoint(Picard(max_iter=2, rtol=0.0, atol=0.0, noise=0.1), Reversible())
    for stop, text in (("every", '"each"|each'), (0.0, "fraction"), (1.5, "fraction")):
        with pytest.raises(ValueError, match=text):
            Picard(stop=stop)
    with pytest.raises(ValueError, match="min_iter"):
        Picard(min_iter=-1)
