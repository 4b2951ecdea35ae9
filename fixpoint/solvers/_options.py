"""The options of a solver class, as help() and editors show them."""

from __future__ import annotations

import inspect

from torch import nn


def whole_signature(kind: type[nn.Module]) -> inspect.Signature:
    """Return the constructor's signature with what `**options` of it and its parents stand for."""
    parameters: dict[str, inspect.Parameter] = {}
    for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        constructor = vars(owner).get("__init__")
        if constructor is None:
            continue
        for name, parameter in list(inspect.signature(constructor).parameters.items())[1:]:
            if parameter.kind is not parameter.VAR_KEYWORD:
                parameters.setdefault(name, parameter)
    ordered = sorted(parameters.values(), key=lambda parameter: parameter.kind)
    return inspect.Signature(ordered)
