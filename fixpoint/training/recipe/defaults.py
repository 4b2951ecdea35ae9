"""Defaults of an ERNN's options, which depend on each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

BOUNDED = ("self-feedback", "linear", "manifold")
"""Maps with ||U||_2 = 0.8 by default, by which an equilibrium exists."""


def fill_defaults(options: Any) -> Any:
    """Replace None by the defaults of an ERNN in the section `model` of a recipe.

    inexact-newton takes one step on the Jordan map, a solver with a tolerance at most 30 on the
    self-feedback map. Options of other models are returned as they are.
    """
    if options.model != "ernn":
        return options
    solver = options.solver or "inexact-newton"
    learned = solver == "inexact-newton"
    name = options.map or ("jordan" if learned else "self-feedback")
    return replace(
        options,
        solver=solver,
        map=name,
        max_iter=options.max_iter or (1 if learned else 30),
        backward=options.backward or ("unrolled" if learned else "implicit"),
        rtol=1e-3 if options.rtol is None and not learned else options.rtol,
        bound=0.8 if options.bound is None and name in BOUNDED else options.bound,
    )
