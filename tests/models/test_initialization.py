"""Starts of the weights of a cell."""

import pytest
import torch

from fixpoint import Anderson, Implicit
from fixpoint.models import (
    ERNN,
    JordanMap,
    LinearMap,
    SelfFeedbackMap,
    bound_spectral_norm,
    identity_transition_,
    scale_recurrence_,
)


@pytest.mark.parametrize("kind", [SelfFeedbackMap, LinearMap])
@pytest.mark.parametrize("bound", [0.5, None])
def test_the_transition_is_the_identity(kind, bound):
    """dh_t / dh_{t-1} at h = 0, by automatic differentiation through two solved time steps."""
    torch.manual_seed(0)
    options = {} if kind is LinearMap else {"nonlinearity": "tanh"}
    cell = identity_transition_(kind(3, 6, bound=bound, **options).double())
    solver = Anderson(rtol=1e-13, atol=1e-13, max_iter=500)
    layer = ERNN(3, 6, map=cell, solver=solver, backward=Implicit())
    x = torch.zeros(2, 1, 3, dtype=torch.float64)

    def end(h0):
        return layer(x, h0.reshape(1, 1, 6))[1].flatten()

    transition = torch.autograd.functional.jacobian(end, torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(transition, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-10)


def test_it_is_kept_where_V_is_parametrized():
    cell = bound_spectral_norm(SelfFeedbackMap(3, 6, bound=0.5), "V", bound=2.0)
    identity_transition_(cell)
    ratio = cell.V / (torch.eye(6) - cell.U)
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio))  # up to the norm of V


def test_the_input_gain_scales_W_alone():
    torch.manual_seed(0)
    cell = SelfFeedbackMap(3, 6, bound=0.5)
    W = cell.W.detach().clone()
    identity_transition_(cell, input_gain=0.1)
    torch.testing.assert_close(cell.W, 0.1 * W)
    torch.testing.assert_close(cell.V, torch.eye(6) - cell.U)
    with pytest.raises(ValueError, match="input_gain must be a finite number > 0; got 0"):
        identity_transition_(cell, input_gain=0)


def test_other_cells_are_refused():
    with pytest.raises(TypeError, match="of a SelfFeedbackMap or LinearMap; got JordanMap"):
        identity_transition_(JordanMap(3, 4))


@pytest.mark.parametrize("rank", [None, 2, 0])
def test_a_gain_scales_V_and_U_alone(rank):
    torch.manual_seed(0)
    cell = JordanMap(3, 4, rank=rank)
    before = {name: p.detach().clone() for name, p in cell.named_parameters()}
    assert scale_recurrence_(cell, 0.3) is cell
    for name, p in cell.named_parameters():
        factor = 1 if name in ("W", "b") else 0.3
        torch.testing.assert_close(p, factor * before[name], rtol=0, atol=0)
        assert p.requires_grad


def test_a_gain_is_of_a_jordan_map_and_positive():
    with pytest.raises(TypeError, match="is for a JordanMap; got SelfFeedbackMap"):
        scale_recurrence_(SelfFeedbackMap(3, 4), 0.3)
    with pytest.raises(ValueError, match="gain must be a finite number > 0; got 0"):
        scale_recurrence_(JordanMap(3, 4), 0)
