"""The DEQ block: against long unrolling, closed forms, and what a user does with it."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from fixpoint import Anderson, InexactNewton, Newton, Phantom, Picard, Unrolled
from fixpoint.models import DEQ, VariationalDropout, bound_spectral_norm, frozen
from fixpoint.regularization import jac_reg

TIGHT = {"rtol": 1e-13, "atol": 1e-13, "max_iter": 300}


class Layer(nn.Module):
    """f(z, x) = tanh(W z + U x + b), ||W||_2 = bound."""

    def __init__(self, d=3, H=5, bound=0.8):
        super().__init__()
        torch.manual_seed(0)
        self.W = bound_spectral_norm(nn.Linear(H, H, bias=False), bound=bound)
        self.U = nn.Linear(d, H)

    def forward(self, z, x):
        return torch.tanh(self.W(z) + self.U(x))


def make(solver=None, backward=None, bound=0.8, **options):
    solver = solver or Anderson(**TIGHT)
    deq = DEQ(Layer(bound=bound), solver, backward, hidden_size=5, **options)
    return deq.double()


def inputs(B=4, d=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("solver", [Anderson(**TIGHT), Newton(**TIGHT), "broyden"])
def test_gradients_against_long_unrolling(solver):
    """400 hand-written updates at a contraction of 0.8: the rest is below 1e-38."""
    deq, x = make(solver), inputs().requires_grad_()
    if solver == "broyden":
        deq.fixed_point.solver = deq.fixed_point.solver.with_options(**TIGHT)
    z = torch.zeros(4, 5, dtype=torch.float64)
    for _ in range(400):
        z = deq.f(z, x)
    wanted = [x, *deq.parameters()]
    g = torch.randn(4, 5, dtype=torch.float64)
    expected = torch.autograd.grad((z * g).sum(), wanted)
    solution = deq(x)
    torch.testing.assert_close(solution, z, rtol=0, atol=1e-11)
    given = torch.autograd.grad((solution * g).sum(), wanted)
    torch.testing.assert_close(given, expected, rtol=1e-8, atol=1e-10)


def test_gradcheck():
    deq = make()
    assert gradcheck(deq, inputs(B=2).requires_grad_(), atol=1e-6, rtol=1e-5)


def test_a_given_backward_is_used():
    deq, x = make(backward=Phantom()), inputs().requires_grad_()
    deq(x).sum().backward()
    # One step from z*: the gradient of f(z*, x) with z* held constant.
    expected = torch.autograd.grad(
        deq.f(deq.solution.z, x.detach().requires_grad_()).sum(), deq.f.U.weight
    )[0]
    torch.testing.assert_close(deq.f.U.weight.grad, expected, rtol=1e-12, atol=0)


def test_pairs_that_make_no_sense_are_refused_when_built():
    with pytest.raises(ValueError, match="eta receives no gradient under Implicit"):
        DEQ(Layer(), InexactNewton(max_iter=2))
    DEQ(Layer(), InexactNewton(max_iter=2), Unrolled())


# The start and the shape of the state.


class Add(nn.Module):
    """f(z, x) = z / 2 + x, whose equilibrium is 2 x."""

    def forward(self, z, x):
        return 0.5 * z + x


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 5, 5), (3,)])
def test_the_state_has_the_shape_of_the_input(shape):
    x = torch.randn(shape)
    torch.testing.assert_close(DEQ(Add())(x), 2 * x, rtol=1e-4, atol=1e-4)


class Coupled(nn.Module):
    """A state (a, {"b": b}) driven by a tuple of inputs."""

    def forward(self, z, x):
        a, b = z[0], z[1]["b"]
        return 0.5 * a + x[0], {"b": 0.5 * b + a.sum(1, keepdim=True) + x[1]}


def test_trees():
    """a = 2 x0, b = 2 (sum a + x1)."""
    deq = DEQ(Coupled(), Anderson(rtol=1e-7, atol=0.0))
    x = (torch.randn(3, 2), torch.randn(3, 4, requires_grad=True))
    z = deq(x, (torch.zeros(3, 2), {"b": torch.zeros(3, 4)}))
    expected = 2 * (2 * x[0].sum(1, keepdim=True) + x[1])
    torch.testing.assert_close(z[1]["b"], expected, rtol=1e-5, atol=1e-5)
    z[1]["b"].sum().backward()
    torch.testing.assert_close(x[1].grad, torch.full((3, 4), 2.0), rtol=1e-4, atol=0)
    assert not deq.solution.z[1]["b"].requires_grad


def test_a_warm_start_saves_iterations_and_changes_no_answer():
    deq, x = make(Anderson(rtol=1e-8, atol=0.0)), inputs()
    deq(x)
    first = deq.solution
    nearby = x + 1e-4
    cold = deq(nearby)
    cold_iterations = deq.solution.iterations
    warm = deq(nearby, first.z)
    assert (deq.solution.iterations < cold_iterations).all()
    torch.testing.assert_close(warm, cold, rtol=0, atol=1e-6)
    deq(x, first.z)
    assert deq.solution.iterations.tolist() == [0, 0, 0, 0]


# What is kept.


def test_the_solution_is_kept_detached_and_holds_no_graph():
    deq = make()
    assert deq.solution is None
    z = deq(inputs())
    assert z.requires_grad
    assert not deq.solution.z.requires_grad
    torch.testing.assert_close(deq.solution.z, z.detach())
    assert deq.solution.converged.all()
    assert deq.state_dict().keys() == {
        "f.W.parametrizations.weight.original",
        "f.U.weight",
        "f.U.bias",
    }


def test_failures_are_reported_not_raised():
    deq = make(Anderson(max_iter=2, rtol=1e-10, atol=0.0), on_failure="ignore")
    deq(inputs())
    with pytest.raises(Exception, match="4 of 4 samples did not converge"):
        deq.solution.check()


def test_deepcopy_after_a_call():
    deq, x = make(), inputs()
    deq(x).sum().backward()
    other = copy.deepcopy(deq)
    assert torch.equal(other(x), deq(x))
    assert torch.equal(other.solution.z, deq.solution.z)


def test_pickle_after_a_call():
    """Of a map without parametrization, which torch does not pickle."""
    deq, x = DEQ(nn.Bilinear(3, 3, 3)), 0.1 * torch.randn(2, 3)
    z = deq(x)
    z.sum().backward()
    other = pickle.loads(pickle.dumps(deq))
    assert torch.equal(other.solution.z, z)
    assert torch.equal(other(x), z)


def test_state_dict_and_dtype():
    deq, x = make(), inputs()
    other = DEQ(Layer(), Anderson(**TIGHT), hidden_size=5).double()
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    other.load_state_dict(deq.state_dict())
    assert torch.equal(other(x), deq(x))
    single = DEQ(Layer(), hidden_size=5, on_failure="ignore")
    assert single(x.float()).dtype == torch.float32
    half = single.bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_gradients_exist_in_evaluation_mode_and_equal_those_of_training_mode():
    deq, x = make(), inputs()
    grads = [
        torch.autograd.grad(deq.train(mode)(x).sum(), deq.f.U.weight)[0] for mode in (True, False)
    ]
    assert torch.equal(*grads)
    with torch.no_grad():
        assert not deq(x).requires_grad


# The penalty.


def test_regularized_returns_the_solution_and_the_penalty_at_it():
    deq, x = make(), inputs()
    z, penalty = deq.regularized(x, samples=None)
    assert torch.equal(z, deq(x))
    expected = jac_reg(lambda z: deq.f(z, x), z.detach(), samples=None)
    torch.testing.assert_close(penalty, expected, rtol=1e-12, atol=0)
    grads = torch.autograd.grad(penalty.sum(), deq.f.U.weight)
    expected = torch.autograd.grad(expected.sum(), deq.f.U.weight)
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=0)


def test_training_with_the_penalty_lowers_it_and_the_iterations():
    class Free(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.W = nn.Parameter(0.9 * torch.linalg.qr(torch.randn(8, 8))[0])

        def forward(self, z, x):
            return torch.tanh(z @ self.W.T + x)

    deq, x = DEQ(Free(), Picard(max_iter=300, rtol=1e-5)), 0.3 * torch.randn(16, 8)
    optimizer = torch.optim.SGD(deq.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(20):
        _, penalty = deq.regularized(x, generator=generator)
        seen.append((penalty.mean().item(), deq.solution.iterations.max().item()))
        optimizer.zero_grad()
        penalty.mean().backward()
        optimizer.step()
    assert seen[-1][0] < 0.7 * seen[0][0]
    assert seen[-1][1] < seen[0][1]


def test_repr_and_bad_size():
    assert "hidden_size=5" in repr(make())
    with pytest.raises(ValueError, match="hidden_size must be at least 1; got 0"):
        DEQ(Layer(), hidden_size=0)


# Functions, further arguments, one state.


def test_a_function_and_further_arguments():
    x, mask = torch.randn(3, 4), torch.tensor([1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(DEQ(lambda z, x: 0.5 * z + x)(x), 2 * x, rtol=1e-4, atol=1e-4)

    def masked(z, x, mask=None):
        return mask * (0.5 * z + x)

    deq = DEQ(masked)
    torch.testing.assert_close(deq(x, mask=mask, rtol=1e-6), 2 * mask * x, rtol=1e-4, atol=1e-4)
    z, _ = deq.regularized(x, mask=mask, max_iter=3)
    assert z.shape == x.shape
    assert len(deq.states(x, at=(1,), mask=mask)) == 2
    with pytest.raises(TypeError, match="unknown Anderson option 'mask'"):
        DEQ(Add())(x, mask=mask)
    with pytest.raises(TypeError, match="f must be a module or a function"):
        DEQ(3)


def test_a_state_without_a_batch_axis():
    deq, x = make(), inputs()
    torch.testing.assert_close(deq(x[0], batched=False), deq(x)[0], rtol=1e-8, atol=1e-10)
    _, penalty = deq.regularized(x[0], batched=False)
    assert penalty.shape == (1,)


@pytest.mark.parametrize(
    ("module", "option"),
    [
        (nn.MultiheadAttention(4, 2, dropout=0.1), "dropout=0.1"),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.2), "dropout=0.2"),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.3), "=0.3"),
        (nn.RReLU(), "lower=0.125.*upper=0.333"),
    ],
)
def test_modules_that_draw_random_numbers_are_refused(module, option):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, z, x):
            return 0.5 * z + x

    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=f"{option}.*draws (a )?new"):
        DEQ(Holder())(x)
    DEQ(Holder().eval())(x)
    nn.LSTM(4, 4, dropout=0.0)


def test_threads_evaluate_one_module():
    """A parametrized weight, masks and running statistics are those of each thread's solve."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.W = bound_spectral_norm(nn.Linear(4, 4), bound=0.5)
            self.dropout, self.norm = VariationalDropout(0.5), nn.BatchNorm1d(4)

        def forward(self, z, x):
            return torch.tanh(self.W(self.dropout(z))) + 0.1 * self.norm(x)

    f, errors = Shared(), []
    x = torch.randn(6, 4)
    deq = DEQ(f, Picard(max_iter=100), on_failure="ignore")
    buffers = dict(f.named_buffers())

    def work():
        try:
            for _ in range(5):
                deq(x).sum().backward()
        except Exception as error:  # threads drop what they raise
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(buffers[name] is buffer for name, buffer in f.named_buffers())
    assert f.norm.num_batches_tracked.item() >= 1
    assert "forward" not in vars(f.W.parametrizations["weight"])


def test_running_statistics_are_the_modules_own_while_another_thread_evaluates():
    norm, x, made = nn.BatchNorm1d(3), torch.randn(5, 3), []
    own = dict(norm.named_buffers())

    def other():
        with frozen(norm) as phi:
            made.append(phi.buffers)

    thread = threading.Thread(target=other)

    def evaluate(z):
        thread.start()
        thread.join(0.2)  # it has to wait for this evaluation
        return norm(z)

    with frozen(norm, evaluate) as phi:
        phi(x)
    thread.join()
    assert all(made[0][norm, name] is buffer for name, buffer in own.items())
