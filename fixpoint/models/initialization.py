"""Initialization of the weights of a map other than that of the paper."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from fixpoint._validation import positive
from fixpoint.models.maps import EquilibriumMap, SelfFeedbackMap


@torch.no_grad()
def identity_transition_(phi: EquilibriumMap, *, input_gain: float = 1.0) -> EquilibriumMap:
    """Set V = I - U in place, so that the transition dh_t / dh_{t-1} starts at the identity.

    Where sigma has slope 1, h_t = h_{t-1} + (I - U)^-1 (W x_t + b): the state, and the gradient
    through time, neither vanish nor explode at the start of training. With U = 0 and relu it is
    the initialization of Le et al. Choose it for equilibria over many time steps: with V from
    N(0, 0.1^2) the transition is random, and training over 128 steps is slow.

    The state sums all inputs. Over many steps it becomes large, and with it the first loss, up to
    ten times that of guessing: `input_gain` makes it smaller. A step of Adam that moves each entry
    of U and V by 0.003 can move their norms by 0.2, which 128 steps raise to a power: a smaller
    learning rate of U and V (`training.recurrent_lr`) keeps the first updates stable.

    Args:
        phi: a `SelfFeedbackMap` or `LinearMap`; returned.
        input_gain: factor of W, in place.

    Raises:
        TypeError: another map.
        ValueError: input_gain is not positive.

    Source: Le, Jaitly, Hinton (2015), A simple way to initialize recurrent networks of rectified
        linear units.

    Example:
        >>> import torch
        >>> from fixpoint.models import SelfFeedbackMap, identity_transition_
        >>> phi = identity_transition_(SelfFeedbackMap(3, 8, nonlinearity="relu", bound=0.5))
        >>> torch.allclose(phi.U + phi.V, torch.eye(8), atol=1e-6)
        True
    """
    if not isinstance(phi, SelfFeedbackMap):
        raise TypeError(
            "identity_transition_ sets V = I - U of a SelfFeedbackMap or LinearMap; "
            f"got {type(phi).__name__}"
        )
    positive(input_gain=input_gain)
    U = phi.U
    identity = torch.eye(len(U), dtype=U.dtype, device=U.device)
    _assign(phi, "V", identity - U)
    if input_gain != 1:
        _assign(phi, "W", input_gain * phi.W)
    return phi


def _assign(phi: EquilibriumMap, name: str, value: Tensor) -> None:
    # A parametrization of a weight is given the new value and decides what to store.
    if parametrize.is_parametrized(phi, name):
        setattr(phi, name, value)
    else:
        getattr(phi, name).copy_(value)
