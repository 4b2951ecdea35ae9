"""The runs of a comparison: names from the command line to a list of `Run`."""

from __future__ import annotations

import itertools
import math

from fixpoint.models import CELLS
from fixpoint.names import unknown_name
from fixpoint.solvers import SOLVERS
from fixpoint.training.run import BACKWARDS, Run

DEFAULT_SOLVERS = ("inexact-newton", "inexact-newton:2", "picard", "anderson", "broyden")
_MAX_ITER = {"inexact-newton": 1}


def parse_solver(spec: str) -> tuple[str, int]:
    """ "name" or "name:max_iter" as name and number of updates.

    Raises:
        ValueError: the name is unknown or the number is none.
    """
    name, colon, count = spec.partition(":")
    if name not in SOLVERS:
        raise ValueError(unknown_name("solver", name, SOLVERS))
    if not colon:
        return name, _MAX_ITER.get(name, 30)
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(
            f"a solver is NAME or NAME:MAX_ITER with MAX_ITER >= 1; got {spec!r}, try {name}:2"
        )
    return name, int(count)


def make_grid(
    *,
    dataset: str,
    solvers: list[str],
    backwards: list[str] | None,
    cell: str | None,
    seeds: list[int],
    epochs: int,
    hidden: int,
    batch_size: int,
    lr: float,
    device: str,
) -> list[Run]:
    """All combinations, each checked.

    With `backwards` None each solver gets those that make sense; with `cell` None inexact-newton
    gets the Jordan cell and solvers with a tolerance the self-feedback cell.

    Raises:
        ValueError: a name is unknown, or a pair that was asked for makes no sense.
    """
    if backwards == []:
        raise ValueError(f"--backward takes {' or '.join(BACKWARDS)}, or both by comma; got none")
    runs = []
    for spec, seed in itertools.product(solvers, seeds):
        solver, max_iter = parse_solver(spec)
        learned = solver == "inexact-newton"
        own_cell = cell or ("jordan" if learned else "self-feedback")
        for backward in backwards or (["unrolled"] if learned else list(BACKWARDS)):
            runs.append(
                Run(
                    dataset=dataset,
                    solver=solver,
                    max_iter=max_iter,
                    backward=backward,
                    cell=own_cell,
                    hidden=hidden,
                    epochs=epochs,
                    batch_size=batch_size,
                    lr=lr,
                    halve_every=max(1, math.ceil(epochs / 3)),
                    seed=seed,
                    device=device,
                )
            )
    return list(dict.fromkeys(runs))


__all__ = ["BACKWARDS", "CELLS", "DEFAULT_SOLVERS", "make_grid", "parse_solver"]
