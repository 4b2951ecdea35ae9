"""Large buffers on the CPU that are used again: pages of fresh ones cost more than their use."""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

SMALL = 2**20  # bytes; malloc returns smaller blocks without new pages
LIMIT = 2**28  # bytes of free blocks that are kept
ALIGNED = 64  # bytes, as torch aligns its own

_free: list[np.ndarray] = []
"""Blocks that no tensor uses any more, the latest last."""
_lock = threading.RLock()  # a collection of garbage inside may free a block


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Call torch.empty; large ones lie in a block that an earlier one of this size has left.

    A block is free once no tensor looks into it. numpy makes new ones of huge pages.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < SMALL:
        return like.new_empty(shape)
    block = _take(size)
    start = -block.__array_interface__["data"][0] % ALIGNED
    view = block[start : start + size].view(str(like.dtype).removeprefix("torch."))
    weakref.finalize(view, _keep, block).atexit = False
    return torch.from_numpy(view).view(shape)


def _take(size: int) -> np.ndarray:
    with _lock:
        for block in reversed(_free):
            if block.size == size + ALIGNED:
                _free[:] = [other for other in _free if other is not block]
                return block
    return np.empty(size + ALIGNED, np.uint8)


def _keep(block: np.ndarray) -> None:
    with _lock:
        _free.append(block)
        while sum(kept.size for kept in _free) > LIMIT:
            del _free[0]
