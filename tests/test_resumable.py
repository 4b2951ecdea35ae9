"""A solve in parts whose slots take new samples."""

import pytest
import torch

from fixpoint import (
    SQUAREM,
    Anderson,
    Broyden,
    DampedPicard,
    InexactNewton,
    Newton,
    Picard,
    Result,
    ResumableSolve,
    solve,
)

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
U = torch.randn(4, 4, generator=GENERATOR, dtype=D) / 3
X = torch.randn(12, 4, generator=GENERATOR, dtype=D) * torch.logspace(-2, 1, 12, dtype=D)[:, None]
RATE = torch.linspace(0.2, 1.0, 12, dtype=D)[:, None]


def phi(z, x, rate):
    return torch.tanh(rate * z @ U + x)


def stream(solver, slots=3, chunk=4):
    """Solutions of all samples by few slots, and the updates that were made."""
    run = ResumableSolve(
        phi, torch.zeros(slots, 4, dtype=D), X[:slots], RATE[:slots], solver=solver
    )
    owner, waiting, done = list(range(slots)), list(range(slots, len(X))), {}
    while len(done) < len(X):
        run.advance(chunk)
        for slot in run.finished.nonzero().flatten().tolist():
            if owner[slot] is None:
                continue
            done[owner[slot]] = run.take(torch.tensor([slot]))
            owner[slot] = waiting.pop(0) if waiting else None
            if owner[slot] is not None:
                new = [owner[slot]]
                run.refill(torch.tensor([slot]), torch.zeros(1, 4, dtype=D), X[new], RATE[new])
    return done, run.updates


@pytest.mark.parametrize(
    "solver",
    [Picard, Anderson, SQUAREM, DampedPicard, lambda **o: Broyden(memory=20, **o)],
    ids=["picard", "anderson", "squarem", "damped", "broyden"],
)
def test_each_sample_is_solved_as_if_alone(solver):
    options = {"rtol": 1e-10, "max_iter": 100}
    done, updates = stream(solver(**options))
    whole = solve(lambda z: phi(z, X, RATE), torch.zeros(12, 4, dtype=D), solver(**options))
    assert whole.converged.all()
    for i, solution in done.items():
        assert solution.converged.tolist() == [True]
        torch.testing.assert_close(solution.z[0], whole.z[i], rtol=0, atol=1e-9)
        if isinstance(solver(), (Picard, Anderson)):
            assert int(solution.iterations) == int(whole.iterations[i])
            torch.testing.assert_close(
                solution.residual[0], whole.residual[i], rtol=1e-3, atol=1e-4
            )
    assert updates < int(whole.iterations.sum())


@pytest.mark.parametrize(
    "solver",
    [
        Broyden(memory=3, max_iter=12, rtol=1e-8),
        Broyden(memory=60, max_iter=12, rtol=1e-8),
        DampedPicard(patience=1, max_iter=12, rtol=1e-8),
    ],
    ids=["full memory", "broyden", "damped"],
)
def test_a_sample_in_a_slot_that_was_used_makes_the_updates_it_makes_alone(solver):
    """Its first steps may grow further than later ones, and its memory is full at its own time."""
    x = torch.tensor([[0.1], [0.6403], [0.9]], dtype=D)
    start = torch.tensor([[0.0], [-0.4481], [-2.0]], dtype=D)

    def rises(z, x):
        return z + torch.exp(-z.abs()) * x

    run = ResumableSolve(rises, start[:2], x[:2], solver=solver)
    for count in (7, 13):
        run.advance(count)
        run.refill(torch.tensor([0]), start[1:2], x[1:2])
    run.advance(13)
    alone = solve(lambda z: rises(z, x[1:2]), start[1:2], solver)
    found = run.take(torch.tensor([0, 1]))
    torch.testing.assert_close(found.z, alone.z.expand(2, 1), rtol=1e-9, atol=0)
    assert found.iterations.tolist() == [12, 12]


def test_each_sample_has_its_own_budget_and_result():
    solver = Picard(max_iter=12, rtol=1e-8)
    rates = torch.tensor([[0.01], [0.9]], dtype=D)
    run = ResumableSolve(lambda z, a, b: a * z + b, 0 * rates, rates, 1 + 0 * rates, solver=solver)
    run.advance(6)
    assert run.finished.tolist() == [True, False]
    one = torch.ones(1, 1, dtype=D)
    run.refill(torch.tensor([True, False]), 0 * one, 0.95 * one, one)
    assert run.finished.tolist() == [False, False]
    assert run.advance(6).tolist() == [False, True]
    second = run.take(torch.tensor([1]))
    assert (Result(second.result.item()), second.iterations.item()) == (Result.MAX_ITER, 12)
    torch.testing.assert_close(second.z, (1 - 0.9 ** torch.full((1, 1), 12.0, dtype=D)) / 0.1)
    run.refill(torch.tensor([1]), 0 * one, 0.5 * one, float("nan") * one)
    run.advance(100)
    both = run.take(torch.tensor([0, 1]))
    assert both.result.tolist() == [Result.MAX_ITER, Result.NONFINITE]
    assert both.iterations[0] == 12
    torch.testing.assert_close(both.z[:1], (1 - 0.95 ** torch.full((1, 1), 12.0, dtype=D)) / 0.05)
    assert run.updates < 25


@pytest.mark.parametrize("refilled", [False, True])
@pytest.mark.parametrize("check_every", [2, 3, 10])
def test_the_budget_is_kept_where_the_host_looks_rarely(check_every, refilled):
    solver = Picard(max_iter=7, check_every=check_every, rtol=1e-12)
    rates = torch.tensor([[0.9], [0.8]], dtype=D)
    run = ResumableSolve(lambda z, a: a * z + 1, 0 * rates, rates, solver=solver)
    if refilled:
        run.advance(2)
        run.refill(torch.tensor([1]), 0 * rates[1:], rates[1:])
    run.advance(20)
    alone = solve(lambda z: rates * z + 1, 0 * rates, solver)
    found = run.take(torch.tensor([0, 1]))
    assert found.iterations.tolist() == alone.iterations.tolist() == [7, 7]
    assert torch.equal(found.z, alone.z)
    assert torch.equal(found.result, alone.result)


def test_parts_are_the_whole():
    solver = Anderson(rtol=1e-10)
    run = ResumableSolve(phi, torch.zeros(12, 4, dtype=D), X, RATE, solver=solver)
    while not run.finished.all():
        run.advance(1)
    whole = solve(lambda z: phi(z, X, RATE), torch.zeros(12, 4, dtype=D), solver)
    found = run.take(torch.ones(12, dtype=torch.bool))
    assert torch.equal(found.iterations, whole.iterations)
    torch.testing.assert_close(found.z, whole.z, rtol=0, atol=1e-12)


def test_what_cannot_be_refilled():
    z0 = torch.zeros(2, 1)
    for solver in (Newton(), InexactNewton(3, rtol=1e-3, learn=False)):
        with pytest.raises((NotImplementedError, ValueError), match="take "):
            ResumableSolve(torch.cos, z0, solver=solver)
    with pytest.raises(ValueError, match='stop must be "each"'):
        ResumableSolve(torch.cos, z0, solver=Picard(stop="all"))
    run = ResumableSolve(torch.cos, z0, solver="picard")
    with pytest.raises(ValueError, match="needs the 0 inputs"):
        run.refill(torch.tensor([0]), z0[:1], z0[:1])
    coupled = ResumableSolve(
        lambda z: z.flip(0) / 2 + torch.tensor([[0.0], [1.0]]), z0, solver="picard"
    )
    with pytest.raises(RuntimeError, match="depend on each other"):
        coupled.advance(50)
