"""States along a solve: their values, their gradients, and the loss on all of them."""

import weakref

import pytest
import torch
from torch import nn

from fixpoint import Anderson, FixedPoint, Implicit, Phantom, Picard, SciPySolver
from fixpoint.models import DEQ, correction_loss, supervised_states


def affine(a):
    return lambda z: a * z + 1


def test_states_are_those_of_the_solve():
    """z_k = 2 (1 - 0.5^k) for z <- 0.5 z + 1 from 0."""
    states, solution = supervised_states(
        FixedPoint(Picard(rtol=1e-6)), affine(0.5), torch.zeros(2, 1), at=(1, 3, 5)
    )
    for z, k in zip(states, (1, 3, 5), strict=False):
        assert torch.allclose(z, torch.full((2, 1), 2 * (1 - 0.5**k)))
    assert solution.converged.all()
    assert torch.allclose(states[-1], torch.full((2, 1), 2.0), atol=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_state_has_a_phantom_gradient_and_the_last_one_that_of_the_layer(steps):
    """d/da of `steps` updates from z_2 = 1.5 held constant; at z* 1 / (1 - a)^2 = 4."""
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    layer = FixedPoint(Picard(rtol=1e-12, atol=0.0, max_iter=100), Implicit())
    (z2, z_star), _ = supervised_states(
        layer, affine(a), torch.zeros(1, 1, dtype=a.dtype), at=(2,), gradient=Phantom(steps)
    )
    (slope,) = torch.autograd.grad(z2.sum(), a, retain_graph=True)
    z, expected = 1.5, 0.0
    for _ in range(steps):
        expected, z = z + 0.5 * expected, 0.5 * z + 1
    assert slope.item() == pytest.approx(expected)
    assert torch.autograd.grad(z_star.sum(), a)[0].item() == pytest.approx(4.0)


def test_a_sample_that_has_ended_repeats_its_last_state():
    states, solution = supervised_states(
        FixedPoint(Picard()), lambda z: 0 * z + 1, torch.zeros(1, 1), at=(1, 40)
    )
    assert solution.iterations.item() == 1
    assert [z.item() for z in states] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("at", [(0,), (3, 2), (2, 2), (51,)])
def test_numbers_of_updates_are_checked(at):
    with pytest.raises(ValueError, match="increasing numbers of updates between 1 and max_iter=50"):
        supervised_states(FixedPoint(Picard()), affine(0.5), torch.zeros(1, 1), at=at)


def test_a_solver_without_states_is_refused():
    with pytest.raises(TypeError, match="SciPySolver runs a loop of its own"):
        supervised_states(FixedPoint(SciPySolver()), affine(0.5), torch.zeros(1, 1), at=(1,))


def test_correction_loss_weighs_the_last_state_by_one():
    states = [torch.tensor([1.0]), torch.tensor([10.0]), torch.tensor([100.0])]
    assert correction_loss(torch.sum, states, gamma=0.1).item() == pytest.approx(101.01)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.W, self.U = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.W(z) + self.U(x))


def test_a_model_trains_on_the_states_of_its_solve():
    torch.manual_seed(0)
    deq, x = DEQ(Layer(), "anderson", hidden_size=4), torch.randn(5, 3)
    states = deq.states(x, at=(1, 2))
    assert [z.shape for z in states] == [(5, 4)] * 3
    assert torch.equal(states[-1], deq(x))
    correction_loss(lambda z: z.square().mean(), states).backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in deq.parameters())


def test_evaluation_may_have_a_solver_of_its_own():
    torch.manual_seed(0)
    deq = DEQ(Layer(), Anderson(rtol=1e-1), hidden_size=4, eval_solver=Anderson(rtol=1e-6))
    x = torch.randn(5, 3)
    deq(x)
    loose = deq.solution.iterations.max()
    deq.eval()(x)
    assert deq.solution.iterations.max() > loose
    assert list(deq.state_dict()) == list(DEQ(Layer(), hidden_size=4).state_dict())


def test_options_of_one_call():
    deq = DEQ(Layer(), Anderson(rtol=1e-5), hidden_size=4, on_failure="ignore")
    x = torch.randn(5, 3)
    deq(x, max_iter=1)
    assert deq.solution.iterations.max() == 1
    assert deq.fixed_point.solver.max_iter == 50
    with pytest.raises(TypeError, match="max_itr.*did you mean 'max_iter'"):
        deq(x, max_itr=1)


def test_a_failure_may_raise():
    deq = DEQ(Layer(), Picard(max_iter=1, rtol=1e-8), hidden_size=4, on_failure="raise")
    with pytest.raises(RuntimeError, match="did not converge"):
        deq(torch.randn(5, 3))


@pytest.mark.parametrize("backward", [Phantom(), None], ids=["phantom", "implicit"])
def test_a_solve_of_fixed_steps_is_exported_with_any_batch(backward):
    deq = DEQ(Layer(), Picard(max_iter=5, rtol=0.0, atol=0.0), backward, hidden_size=4).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(deq, (torch.randn(4, 3),), dynamic_shapes=({0: batch},))
    x = torch.randn(9, 3)
    assert torch.allclose(program.module()(x), deq(x))


def test_only_the_states_asked_for_are_kept():
    class Counting(Picard):
        def with_options(self, **options):
            assert options.get("record") is None
            return super().with_options(**options)

    alive = []

    def phi(z):
        alive[:] = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(z))
        most.append(len(alive))
        return 0.9 * z + 1

    counts = []
    for updates in (20, 80):
        most = []
        layer = FixedPoint(Counting(rtol=1e-12, atol=0.0, max_iter=updates), on_failure="ignore")
        with torch.no_grad():
            supervised_states(layer, phi, torch.zeros(2, 1), at=(1, 5))
        counts.append(max(most))
    assert counts[1] <= counts[0] + 1


def test_auto_has_states_too():
    states, _ = supervised_states(FixedPoint("auto"), affine(0.5), torch.zeros(1, 1), at=(1,))
    assert [round(z.item(), 3) for z in states] == [1.0, 2.0]
