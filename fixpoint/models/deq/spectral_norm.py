"""A bound on the 2-norm of a weight, so that a map built on it contracts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn.utils import parametrizations, parametrize

from fixpoint._messages import unknown_name
from fixpoint._torch import inside_transform
from fixpoint._validation import positive

Module = TypeVar("Module", bound=nn.Module)


def bound_spectral_norm(
    module: Module, name: str = "weight", *, bound: float = 0.95, only_above: bool = False
) -> Module:
    """Keep ||W||_2 of a weight at `bound`, through training; returns the module.

    The weight becomes bound * W / ||W||_2, a parametrization of torch.nn.utils.parametrize. With
    a bound below 1 and an activation of slope at most 1, z -> sigma(W z + x) is a contraction: it
    has exactly one fixed point. `jac_reg` is the milder way, a penalty instead of a bound.

    ||W||_2 is exact, by singular values, so the bound holds after any training step, and W does
    not change from one read to the next. `torch.nn.utils.parametrizations.spectral_norm` does
    neither: its running estimate is too small while singular values cross in training, by up to
    a fifth. A read costs 0.3 ms for 80 x 80 and 60 ms for 512 x 512 on one core, so read W once a
    solve, or solve `with frozen(...)`, as `DEQ` does. On a CUDA device it takes some 50 small
    operations, and the host waits for none. For much larger weights take torch's, with
    a bound that leaves it room.

    For a convolution the bound is on W as an (out, in * kernel) matrix; the norm of the
    convolution itself may be larger, by at most the square root of the kernel's size.

    Args:
        module: owner of the weight.
        name: name of the weight, a parameter of at least two axes.
        bound: 2-norm to keep.
        only_above: leave a W of a smaller norm as it is, so that training may lower the norm; the
            bound is then one from above, and W may be zero.

    Raises:
        ValueError: the bound is not positive, or the weight is not there, has fewer than two
            axes, or is zero.

    Example:
        >>> import torch
        >>> from fixpoint.models import bound_spectral_norm
        >>> linear = bound_spectral_norm(torch.nn.Linear(4, 4), bound=0.9)
        >>> round(torch.linalg.matrix_norm(linear.weight, 2).item(), 4)
        0.9
    """
    positive(bound=bound)
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        known = ", ".join(key for key, _ in module.named_parameters(recurse=False)) or "none"
        raise ValueError(f"{type(module).__name__} has no weight {name!r}; it has {known}")
    if weight.dim() < 2:
        raise ValueError(f"{name} must have at least two axes; its shape is {tuple(weight.shape)}")
    if weight.device.type != "meta" and not (only_above or weight.any()):
        raise ValueError(f"{name} is zero, so no factor gives it the norm {bound}: initialise it")
    parametrize.register_parametrization(module, name, _NormBound(bound, only_above))
    return module


NormKind = Literal["spectral", "weight"]
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def normalize_weights(
    model: Module,
    kind: NormKind = "spectral",
    *,
    bound: float = 0.95,
    skip: Sequence[str] = (),
) -> Module:
    """Normalize the weight of every linear and convolutional layer of a model; returns the model.

    Args:
        kind: "spectral" for `bound_spectral_norm` of each weight, "weight" for `weight_norm` of
            torch (direction and length of each row apart).
        bound: 2-norm to keep, of "spectral".
        skip: names of submodules to leave out, with all below them.

    Raises:
        ValueError: an unknown kind, a name in `skip` that the model does not have, or no layer
            to normalize.

    Example:
        >>> import torch
        >>> from fixpoint.models import normalize_weights
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> model = normalize_weights(model, bound=0.8, skip=("1",))
        >>> round(torch.linalg.matrix_norm(model[0].weight, 2).item(), 4)
        0.8
    """
    if kind not in get_args(NormKind):
        raise ValueError(unknown_name("kind of norm", kind, get_args(NormKind)))
    names = dict(model.named_modules())
    for name in skip:
        if name not in names:
            raise ValueError(unknown_name("submodule", name, [key for key in names if key]))
    layers = [
        layer
        for key, layer in names.items()
        if isinstance(layer, WEIGHTED) and not any(f"{key}.".startswith(f"{s}.") for s in skip)
    ]
    if not layers:
        raise ValueError("the model has no linear or convolutional layer to normalize")
    for layer in layers:
        if kind == "spectral":
            bound_spectral_norm(layer, bound=bound)
        else:
            parametrizations.weight_norm(layer)
    return model


class _NormBound(nn.Module):
    """The parametrization W -> bound * W / ||W||_2, or W itself where that is smaller."""

    def __init__(self, bound: float, only_above: bool) -> None:
        super().__init__()
        self.bound, self.only_above = bound, only_above

    def forward(self, W: Tensor) -> Tensor:
        matrix = W.flatten(1).to(torch.promote_types(W.dtype, torch.float32))
        norm = _spectral_norm(matrix)
        if self.only_above:
            norm = norm.clamp_min(self.bound)
        return W * (self.bound / norm).to(W.dtype)

    def right_inverse(self, W: Tensor) -> Tensor:
        """Return what to store when W is assigned."""
        return W

    def extra_repr(self) -> str:
        return f"bound={self.bound:g}" + (", only_above=True" if self.only_above else "")


def _spectral_norm(W: Tensor) -> Tensor:
    """Return ||W||_2 of a matrix; on a CUDA device by products, without a wait of the host."""
    by_products = W.is_cuda and not torch.compiler.is_compiling() and not inside_transform()
    norm: Tensor = _NormByProducts.apply(W) if by_products else torch.linalg.matrix_norm(W, 2)
    return norm


class _NormByProducts(Function):
    """||W||_2 by repeated squares of the Gram matrix; gradients of gradients by singular values.

    After 20 squares a direction whose singular value is smaller by a part in 10^6 is gone, and any
    combination of those that remain has the norm to rounding, however many are equal.
    """

    SQUARES = 20

    @staticmethod
    def forward(ctx: Any, W: Tensor) -> Tensor:
        flat = W if len(W) <= W.shape[1] else W.mT
        power = flat @ flat.mT
        for _ in range(_NormByProducts.SQUARES):
            power = power / torch.linalg.matrix_norm(power)
            power = power @ power
        longest = torch.linalg.vector_norm(power, dim=0).argmax(keepdim=True)
        u = nn.functional.normalize(power.index_select(1, longest).squeeze(1), dim=0)
        v = flat.mT @ u
        norm = torch.linalg.vector_norm(v)
        v = v / norm
        ctx.save_for_backward(W, *((u, v) if len(W) <= W.shape[1] else (v, u)))
        return norm

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        W, u, v = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return grad * torch.outer(u, v)
        norm = torch.linalg.matrix_norm(W, 2)
        (gradient,) = torch.autograd.grad(norm, W, grad, create_graph=True)
        return gradient
