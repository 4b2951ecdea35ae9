"""Initialization of the weights of a map other than that of the paper."""

from __future__ import annotations

import torch

from fixpoint._validation import positive
from fixpoint.models._parameters import assign
from fixpoint.models.maps import EquilibriumMap, JordanMap, SelfFeedbackMap


@torch.no_grad()
def scale_recurrence_(phi: JordanMap, gain: float) -> JordanMap:
    """Multiply V and U, or both factors of U, by a gain in place.

    N(0, 0.1^2) gives V a spectral radius of 0.1 sqrt(n): beyond 1 for n > 100. A step then enlarges
    some directions of the state, a relu network grows with the length of the sequence, and what V
    drew at random outweighs what it learns. Choose a gain that brings the radius below 1, as 0.3
    for n = 256.

    Args:
        phi: returned.
        gain: a factor > 0.

    Raises:
        TypeError: another map.
        ValueError: gain is not positive.

    Example:
        >>> import torch
        >>> from fixpoint.models import JordanMap, scale_recurrence_
        >>> phi = scale_recurrence_(JordanMap(256, 256, rank=8), 0.3)
        >>> bool(torch.linalg.eigvals(phi.V).abs().max() < 0.6)
        True
    """
    if not isinstance(phi, JordanMap):
        raise TypeError(f"scale_recurrence_ is for a JordanMap; got {type(phi).__name__}")
    positive(gain=gain)
    for name, _ in list(phi.named_parameters(recurse=False)):
        if name in ("V", "U", "U1", "U2"):
            assign(phi, name, gain * getattr(phi, name))
    return phi


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
    assign(phi, "V", identity - U)
    if input_gain != 1:
        assign(phi, "W", input_gain * phi.W)
    return phi
