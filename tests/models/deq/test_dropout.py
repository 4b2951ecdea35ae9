"""Dropout with one mask a solve, and modules held still during one."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrizations

from fixpoint import Anderson, FixedPoint, Implicit, Picard, Unrolled
from fixpoint.models import DEQ, VariationalDropout, bound_spectral_norm, frozen

TIGHT = {"rtol": 1e-12, "atol": 1e-12, "max_iter": 200}


def contracting(*more, D=6):
    """A linear map of norm 0.5 with an offset, then `more`, float64."""
    torch.manual_seed(0)
    return nn.Sequential(bound_spectral_norm(nn.Linear(D, D), bound=0.5), *more).double()


def start(B=4, D=6):
    return torch.zeros(B, D, dtype=torch.float64)


# The mask.


def test_a_mask_drops_p_and_scales_the_rest():
    dropout = VariationalDropout(0.3)
    with frozen(dropout) as phi:
        out = phi(torch.ones(100, 400))
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    # 40000 numbers: the standard deviation of the share is 0.0023.
    assert (out == 0).float().mean().item() == pytest.approx(0.3, abs=0.012)
    assert not torch.equal(out[0], out[1])  # each sample has its own


def test_one_mask_within_a_context_and_another_in_the_next():
    dropout, ones = VariationalDropout(0.5), torch.ones(8, 32)
    with frozen(dropout) as phi:
        first = phi(ones)
        assert torch.equal(phi(ones), first)
        assert torch.equal(phi(2 * ones), 2 * first)
    with frozen(dropout) as other:
        assert not torch.equal(other(ones), first)
        # Each map has its own mask, also after its context and while another is open.
        assert torch.equal(phi(ones), first)


def test_two_dropouts_and_two_shapes_have_masks_of_their_own():
    model = nn.ModuleList([VariationalDropout(), VariationalDropout()])
    ones = torch.ones(8, 32)

    def both(z):
        return [dropout(x) for dropout in model for x in (z, z[:, :16])]

    with frozen(model, both) as phi:
        masks = phi(ones)
        assert all(torch.equal(*pair) for pair in zip(phi(ones), masks, strict=True))
    assert not torch.equal(masks[0], masks[2])
    assert masks[1].shape == (8, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_of_the_input(dtype):
    dropout = VariationalDropout(0.25)
    with frozen(dropout) as phi:
        out = phi(torch.ones(4, 64, dtype=dtype))
        (mask,) = phi.masks.values()
    assert out.dtype == mask.dtype == dtype
    assert 0 < (out == 0).sum() < 200


def test_device_of_the_input():
    with frozen(VariationalDropout()) as phi:
        assert phi(torch.ones(2, 3, device="meta")).device.type == "meta"


def test_identity_in_evaluation_mode_and_at_p_0():
    z = torch.randn(4, 5)
    assert VariationalDropout(0.9).eval()(z) is z
    assert VariationalDropout(0.0)(z) is z
    with frozen(VariationalDropout(0.9).eval()) as phi:
        assert phi(z) is z


def test_training_outside_of_a_held_map_is_refused():
    model = contracting(VariationalDropout(0.5))
    with pytest.raises(RuntimeError, match="outside of a held map.*`with frozen"):
        FixedPoint()(model, start())
    with frozen(model) as phi:
        phi(start())
        with pytest.raises(RuntimeError, match="outside of a held map"):
            model(start())


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_p_is_checked(p):
    with pytest.raises(ValueError, match="p must be at least 0 and below 1; got"):
        VariationalDropout(p)


def test_nothing_is_kept_in_the_module():
    dropout = VariationalDropout(0.5)
    with frozen(dropout) as phi:
        out = phi(torch.ones(2, 8))
    for other in (dropout, copy.deepcopy(dropout), pickle.loads(pickle.dumps(dropout))):
        assert other.state_dict() == {}
        assert "masks" not in vars(other)
        assert other.p == 0.5
    torch.manual_seed(1)
    with frozen(copy.deepcopy(dropout)) as phi:
        assert not torch.equal(phi(torch.ones(2, 8)), out)


# Solves and gradients.


@pytest.mark.parametrize("name", ["anderson", "picard", "broyden"])
def test_a_solve_converges_because_the_mask_is_unchanged(name):
    model = contracting(VariationalDropout(0.5))
    with frozen(model) as phi:
        solution = FixedPoint(name)(phi, start()).check()
        residual = phi(solution.z) - solution.z
    assert residual.abs().max() < 1e-4
    dropped = (solution.z == 0).double().mean().item()
    assert 0.1 < dropped < 0.9


class Masked(nn.Module):
    """f(z, x) = tanh(dropout(W z) + x), ||W||_2 = 0.4: at p = 0.5 the map contracts by 0.8."""

    def __init__(self, D=4):
        super().__init__()
        torch.manual_seed(0)
        self.W = bound_spectral_norm(nn.Linear(D, D, bias=False), bound=0.4)
        self.dropout = VariationalDropout(0.5)

    def forward(self, z, x):
        return torch.tanh(self.dropout(self.W(z)) + x)


@pytest.mark.parametrize("backward", [Implicit, Unrolled])
def test_gradcheck_with_the_mask_held(backward):
    """Forward, backward and finite differences of one seed see one mask."""
    deq = DEQ(Masked().double(), Anderson(**TIGHT), backward())

    def run(weight, x):
        torch.manual_seed(5)
        parameters = {"f.W.parametrizations.weight.original": weight}
        return torch.func.functional_call(deq, parameters, (x,))

    weight = deq.f.W.parametrizations.weight.original.detach().clone().requires_grad_()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(run, (weight, x), atol=1e-6, rtol=1e-5)


def test_gradgradcheck_with_the_mask_held():
    """A second derivative evaluates f again, long after the solve."""
    deq = DEQ(Masked().double(), Anderson(**TIGHT))

    def run(x):
        torch.manual_seed(5)
        first = deq(x)
        return first + deq(x.flip(0))

    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(run, x, atol=1e-6, rtol=1e-5)


def test_the_implicit_gradient_of_each_of_two_solves_has_its_own_mask():
    """Both solves in one graph, backward at the end: each against its adjoint by hand."""
    deq = DEQ(Masked().double(), Anderson(**TIGHT))
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    z = torch.stack([deq(x[0]), deq(x[1])])
    z.sum().backward()
    torch.manual_seed(1)
    masks = torch.empty(2, 3, 4, dtype=torch.float64)
    for mask in masks:
        mask.bernoulli_(0.5).mul_(2)
    assert not torch.equal(masks[0], masks[1])
    W = deq.f.W.weight.detach()
    slope = (1 - z**2).detach()
    J = slope.unsqueeze(3) * masks.unsqueeze(3) * W
    u = torch.linalg.solve(torch.eye(4, dtype=W.dtype) - J.mT, torch.ones_like(z).unsqueeze(3))
    torch.testing.assert_close(x.grad, slope * u.squeeze(3).detach(), rtol=1e-9, atol=1e-11)


# What else changes while it is evaluated.


class Normalized(nn.Module):
    """f(z, x) = 0.3 tanh(BatchNorm(W z + x)), counting its evaluations."""

    def __init__(self, D=4):
        super().__init__()
        torch.manual_seed(0)
        self.W = nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D)
        self.calls = 0

    def forward(self, z, x):
        self.calls += 1
        return 0.3 * torch.tanh(self.norm(self.W(z) + x))


@pytest.mark.parametrize("backward", [Implicit, Unrolled])
def test_batch_norm_statistics_are_updated_once_a_solve(backward):
    f = Normalized().double()
    deq = DEQ(f, Picard(rtol=1e-9, atol=0.0, max_iter=200), backward())
    x = 2 + torch.randn(32, 4, dtype=torch.float64)
    z = deq(x)
    assert f.calls > 5
    z.sum().backward()
    assert f.norm.num_batches_tracked == 1
    # By what it saw at the equilibrium: momentum 0.1 from mean 0 and variance 1.
    seen = (f.W(z) + x).detach()
    close = {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(f.norm.running_mean, 0.1 * seen.mean(0), **close)
    torch.testing.assert_close(f.norm.running_var, 0.9 + 0.1 * seen.var(0), **close)
    deq(x)
    assert f.norm.num_batches_tracked == 2


def test_buffers_remain_the_same_tensors_and_evaluation_leaves_them():
    deq = DEQ(Normalized())
    before = dict(deq.named_buffers())
    deq(torch.randn(8, 4))
    after = dict(deq.named_buffers())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    kept = {name: buffer.clone() for name, buffer in after.items()}
    deq.eval()(torch.randn(8, 4))
    assert all(torch.equal(kept[name], buffer) for name, buffer in deq.named_buffers())


def test_a_late_evaluation_leaves_the_statistics():
    """As a second derivative makes one, after further solves."""
    f, x = Normalized(), torch.randn(8, 4)
    with frozen(f) as phi:
        phi(x, x)
    with frozen(f) as other:
        other(x + 5, x)
    kept = f.norm.running_mean.clone()
    phi(x, x)
    assert torch.equal(f.norm.running_mean, kept)


def test_an_error_leaves_the_buffers_and_the_weights():
    f = Normalized()
    bound_spectral_norm(f.W)
    kept = {name: buffer.clone() for name, buffer in f.named_buffers()}

    def broken(z):
        f(z, z)
        raise ZeroDivisionError

    def evaluate():
        with frozen(f, broken) as phi:
            phi(torch.randn(8, 4))

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert all(torch.equal(kept[name], buffer) for name, buffer in f.named_buffers())
    with torch.no_grad():
        f.W.parametrizations.weight.original.copy_(torch.eye(4))
    torch.testing.assert_close(f.W.weight, 0.95 * torch.eye(4))


def test_a_parametrized_weight_is_computed_once_a_solve():
    """torch's spectral_norm makes one power iteration a read: the map would drift."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)))
    reads = []
    model[0].parametrizations.weight[0].register_forward_hook(lambda *_: reads.append(1))
    with frozen(model, lambda z: 0.5 * model(z)) as phi:
        solution = FixedPoint(Picard(rtol=1e-6, max_iter=100))(phi, torch.zeros(2, 6)).check()
    assert len(reads) == 1
    solution.z.sum().backward()
    assert model[0].parametrizations.weight.original.grad.any()
    model(torch.zeros(2, 6))
    assert len(reads) == 2


class WithDropout(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, z, x):
        return 0.5 * self.dropout(z) + x


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
def test_a_dropout_of_torch_is_refused(kind):
    deq = DEQ(WithDropout(kind(0.1)))
    with pytest.raises(ValueError, match=f"{kind.__name__}.p=0.1. .*use VariationalDropout"):
        deq(torch.zeros(2, 3))
    deq.eval()(torch.zeros(2, 3))
    DEQ(WithDropout(kind(0.0)))(torch.zeros(2, 3))


class Outer(nn.Module):
    """f(z, x) = 0.5 (inner DEQ of x + z / 2) + x."""

    def __init__(self, inner):
        super().__init__()
        self.inner = DEQ(inner, Picard(**TIGHT))

    def forward(self, z, x):
        return 0.5 * self.inner(x + 0.5 * z) + x


def test_a_deq_in_a_deq_joins_its_map():
    deq = DEQ(Outer(Masked().double()), Anderson(**TIGHT))
    deq(torch.randn(3, 4, dtype=torch.float64))
    # With a new mask at each of its solves the inner equilibrium would jump.
    deq.solution.check()
    normalized = DEQ(Outer(Normalized().double()), Picard(rtol=1e-7, max_iter=200))
    normalized(torch.randn(16, 4, dtype=torch.float64))
    normalized.solution.check()
    assert normalized.f.inner.f.norm.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("shape", "shared", "constant"),
    [((3, 5, 7), (2,), 2), ((3, 5, 7), (1,), 1), ((3, 5, 2, 2), (2, 3), 3)],
)
def test_a_mask_is_constant_along_shared_axes(shape, shared, constant):
    dropout = VariationalDropout(0.5, shared_dims=shared)
    with frozen(dropout) as phi:
        kept = phi(torch.ones(shape)) != 0
    assert torch.equal(kept.all(constant), kept.any(constant))
    assert 0 < kept.double().mean() < 1
    assert not torch.equal(kept[0], kept[1]) or not torch.equal(kept[0], kept[2])


def test_shared_axes_are_checked():
    with pytest.raises(ValueError, match="axes from 1"):
        VariationalDropout(shared_dims=(0,))
    message = r"needs an input with an axis 2; got shape \(3, 4\)"
    with (
        frozen(VariationalDropout(shared_dims=(2,))) as phi,
        pytest.raises(ValueError, match=message),
    ):
        phi(torch.ones(3, 4))
