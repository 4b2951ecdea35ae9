"""The runs of a comparison: names from the command line to a list of recipes."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fixpoint.solvers import SOLVERS
from fixpoint.training.engine.model_factory import BACKWARDS, resolve
from fixpoint.training.recipe.plugins import load_plugin, named
from fixpoint.training.recipe.schema import Recipe

DEFAULT_SOLVERS = ("inexact-newton", "inexact-newton:2", "picard", "anderson", "broyden")
DEFAULT_BACKWARDS = ("unrolled", "implicit")

STEPS: dict[str, Any] = {"nonlinearity": "relu", "eta": 0.03, "lr": 0.01, "clip": 1.0}
EQUILIBRIUM: dict[str, Any] = {
    **{"nonlinearity": "relu", "init": "identity", "bound": 0.5},
    **{"lr": 0.003, "clip": 1.0, "input_gain": 0.1, "recurrent_lr": 0.1},
}
"""Settings of K steps on the Jordan map, and of equilibria of the self-feedback map: the best of
16 each on training people held out by subject (`benchmarks/fair_start.py`), but for the bound, 0.5
in place of 0.8, which is as accurate and takes fewer iterations. With the input gain and the
learning rate of U and V the first loss is near that of guessing; the accuracy is the same."""

OF_IDENTITY = ("input_gain", "recurrent_lr")
"""Keys of `EQUILIBRIUM` that belong to its init."""


def parse_solver(spec: str) -> tuple[str, int | None]:
    """Return "name" or "name:max_iter" as name and number of updates, None where it is not given.

    A name is one of `SOLVERS` or "package.module:Class".

    Raises:
        ValueError: the name is unknown or the number is not one.
    """
    name, colon, count = spec.partition(":")
    if colon and name not in SOLVERS and ":" in spec:
        # The class of a solver, with or without a number behind it.
        place, _, last = spec.rpartition(":")
        name, colon, count = (place, ":", last) if last.isdecimal() else (spec, "", "")
    named("solver", name, SOLVERS)
    if not colon:
        return name, None
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(
            f"a solver is NAME or NAME:MAX_ITER with MAX_ITER >= 1; got {spec!r}, try {name}:2"
        )
    return name, int(count)


def make_grid(
    base: Recipe,
    *,
    datasets: list[str],
    models: list[str],
    solvers: list[str],
    maps: list[str] | None,
    backwards: list[str] | None,
    seeds: list[int],
    given: Collection[str] = (),
) -> list[Recipe]:
    """Return all combinations; solvers, maps and backwards are those of ernn.

    With `backwards` None each solver gets those that make sense; with `maps` None inexact-newton
    gets the Jordan map and solvers with a tolerance the self-feedback map. The Jordan map has a
    U of rank 8 unless `base` has another. Where `base` has the default of a key in `STEPS` or
    `EQUILIBRIUM`, and `given` does not name it, the runs on those maps have that value.

    Raises:
        ValueError: a name is unknown, or an option belongs to another model.

    Example:
        >>> from fixpoint.training import Recipe, make_grid
        >>> names = dict(datasets=["har2-sample"], models=["ernn", "lstm"], solvers=["anderson"])
        >>> len(make_grid(Recipe(), maps=None, backwards=["implicit"], seeds=[0, 1], **names))
        4
    """
    if backwards == []:
        raise ValueError(f"--backward takes {', '.join(BACKWARDS)}, or several by comma; got none")
    chosen = {*base.differing, *given}
    for place in base.model.plugins:
        load_plugin(place)
    runs = []
    for dataset, model in itertools.product(datasets, models):
        options = _ernn_options(base, solvers, maps, backwards) if model == "ernn" else [{}]
        for own, seed in itertools.product(options, seeds):
            start = {k: v for k, v in _start(own).items() if k not in chosen}
            if "init" not in start:
                start = {k: v for k, v in start.items() if k not in OF_IDENTITY}
            run = base.changed(dataset=dataset, model=model, seed=seed, **start, **own)
            runs.append(replace(run, model=resolve(run.model)))
    return list(dict.fromkeys(runs))


def _ernn_options(
    base: Recipe, solvers: list[str], maps: list[str] | None, backwards: list[str] | None
) -> list[dict[str, Any]]:
    options = []
    for spec in solvers:
        solver, max_iter = parse_solver(spec)
        learned = solver == "inexact-newton"
        for phi in maps or ["jordan" if learned else "self-feedback"]:
            for backward in backwards or (["unrolled"] if learned else list(DEFAULT_BACKWARDS)):
                own: dict[str, Any] = {"solver": solver, "map": phi, "backward": backward}
                if max_iter is not None:
                    own["max_iter"] = max_iter
                if phi == "jordan":
                    own["rank"] = base.model.rank or 8
                options.append(own)
    return options


def _start(own: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a pair of solver and map; none for pairs that they were not chosen
    on.
    """
    learned = own.get("solver") == "inexact-newton"
    starts = {("jordan", True): STEPS, ("self-feedback", False): EQUILIBRIUM}
    return starts.get((str(own.get("map")), learned), {})
