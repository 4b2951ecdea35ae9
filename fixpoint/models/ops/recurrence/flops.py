"""Formulas by which torch.utils.flop_counter counts the registered operations."""

from __future__ import annotations

from typing import Any

import torch

from fixpoint._torch import flop_registries


def count_flops(recurrence: Any) -> None:
    """Let counters of FLOPs know a recurrence: its products, two operations each, and no more.

    Called where a mode sees the operations: the counter takes seconds to import, and who counts has
    done so.
    """
    operation = getattr(torch.ops.fixpoint, recurrence.name)
    for registry in flop_registries():
        if operation not in registry:
            registry.update(_formulas(recurrence))


def _formulas(recurrence: Any) -> dict[Any, Any]:
    from torch.utils.flop_counter import shape_wrapper

    fields = recurrence.inputs._fields
    matrix = "A" if "A" in fields else "V"

    def products(shapes: Any) -> int:
        """Return one pass: those with the state in each inner step and those with x in each time
        step.
        """
        given = dict(zip(fields, shapes, strict=False))
        (T, B, d), inner = given["x"], given["a"][1] if "a" in fields else 1
        rows, n = given[matrix]
        inside = 0 if given["W"] is None else d * rows
        return 2 * T * B * (inner * rows * n + inside)

    def once(*shapes: Any, **_: Any) -> int:
        return products(shapes)

    def twice(grads: Any, needed: Any, saved: Any, *shapes: Any, **_: Any) -> int:
        return 2 * products(shapes)

    names = {"": once, "_train": once, "_backward": twice}
    return {
        getattr(torch.ops.fixpoint, recurrence.name + suffix): shape_wrapper(formula)
        for suffix, formula in names.items()
    }
