"""Function modes of torch that can be paused, and their effect on nested arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fixpoint._torch import function_modes


class RecordingMode(TorchFunctionMode):
    """A function mode that `unrecorded` pauses.

    Attributes:
        paused: whether operations are let through as they are.
    """

    paused = False


@contextmanager
def unrecorded() -> Iterator[None]:
    """Hide operations from the recordings that are under way around them."""
    modes = [mode for mode in function_modes() if isinstance(mode, RecordingMode)]
    before = [mode.paused for mode in modes]
    for mode in modes:
        mode.paused = True
    try:
        yield
    finally:
        for mode, paused in zip(modes, before, strict=True):
            mode.paused = paused


def map_nested(x: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same structure of tuples, lists and dicts with the function of each leaf."""
    if type(x) is tuple:
        return tuple([map_nested(part, function) for part in x])
    if type(x) is list:
        return [map_nested(part, function) for part in x]
    if type(x) is dict:
        return {name: map_nested(part, function) for name, part in x.items()}
    if isinstance(x, tuple) and type(x) is not torch.Size:
        parts = [map_nested(part, function) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return function(x)
