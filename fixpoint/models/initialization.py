"""How the weights of a cell start, where the draw of the paper does not serve."""

from __future__ import annotations

import torch
from torch.nn.utils import parametrize

from fixpoint.models.maps import EquilibriumMap, SelfFeedbackMap


@torch.no_grad()
def identity_transition_(cell: EquilibriumMap) -> EquilibriumMap:
    """Set V = I - U in place, so that the transition dh_t / dh_{t-1} starts at the identity.

    Where sigma has slope 1, h_t = h_{t-1} + (I - U)^-1 (W x_t + b): the state, and the gradient
    through time, neither vanish nor explode at the start of training. With U = 0 and relu it is
    the initialization of Le et al. Choose it for equilibria over many time steps: with V from
    N(0, 0.1^2) the transition is random, and training over 128 steps is slow.

    Args:
        cell: a `SelfFeedbackMap` or `LinearMap`; returned.

    Raises:
        TypeError: another cell.

    Source: Le, Jaitly, Hinton (2015), A simple way to initialize recurrent networks of rectified
        linear units.

    Example:
        >>> import torch
        >>> from fixpoint.models import SelfFeedbackMap, identity_transition_
        >>> cell = identity_transition_(SelfFeedbackMap(3, 8, nonlinearity="relu", bound=0.5))
        >>> torch.allclose(cell.U + cell.V, torch.eye(8), atol=1e-6)
        True
    """
    if not isinstance(cell, SelfFeedbackMap):
        raise TypeError(
            "identity_transition_ sets V = I - U of a SelfFeedbackMap or LinearMap; "
            f"got {type(cell).__name__}"
        )
    U = cell.U
    identity = torch.eye(len(U), dtype=U.dtype, device=U.device)
    # V may carry a parametrization of its own, to which an assignment gives what to store.
    if parametrize.is_parametrized(cell, "V"):
        cell.V = identity - U
    else:
        cell.V.copy_(identity - U)
    return cell
