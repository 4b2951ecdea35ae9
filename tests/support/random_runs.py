"""Runs whose weights are drawn at random, large enough that no state is near 0."""

import functools
import shutil
from pathlib import Path

import numpy as np
import torch

from fixpoint.export import read_network
from fixpoint.training import Recipe, Trained, make_model, prepare

STRICT = (
    *("-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic"),
    *("-Wshadow", "-Wconversion"),
)
SANITIZED = (*STRICT, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

MODELS = {
    "ernn": {"model": "ernn", "rank": 2},
    "ernn in factors": {"model": "ernn", "rank": 2, "fold": False},
    "ernn K=2 tanh": {"model": "ernn", "max_iter": 2, "nonlinearity": "tanh", "eta": 0.3},
    "ernn K=2 full U": {"model": "ernn", "max_iter": 2, "eta": 0.1, "fold": False},
    "ernn without U": {"model": "ernn", "rank": 0, "fold": False},
    "fastrnn": {"model": "fastrnn"},
    "fastrnn of rank 2": {"model": "fastrnn", "rank": 2},
    "fastgrnn": {"model": "fastgrnn"},
    "fastgrnn of rank 2": {"model": "fastgrnn", "rank": 2, "nonlinearity": "relu"},
    "rnn": {"model": "rnn"},
    "ernn of 2 layers": {"model": "ernn", "num_layers": 2, "rank": 2},
    "rnn of 2 layers": {"model": "rnn", "num_layers": 2},
    "ugrnn": {"model": "ugrnn"},
    "gru": {"model": "gru"},
    "gru of 3 layers": {"model": "gru", "num_layers": 3},
    "lstm": {"model": "lstm"},
    "lstm of 2 layers": {"model": "lstm", "num_layers": 2},
    "self-feedback": {"model": "ernn", "map": "self-feedback", "eta": -0.02},
}
NORMALIZATIONS = ("column", "channel", "asinh", "none")


@functools.cache
def _prepared(normalize, rotate):
    return prepare(Recipe().changed(normalize=normalize, rotate=rotate))


def random_run(*, seed=0, normalize="asinh", **options):
    """A run on the bundled windows with random weights, not trained."""
    recipe = Recipe().changed(normalize=normalize, **{"hidden": 12, **options})
    ready = _prepared(normalize, recipe.training.rotate)
    torch.manual_seed(seed)
    model = make_model(recipe.model, ready.data).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("eta"):
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif name.endswith((".b", "b_z", "b_h")) or "bias" in name:
                parameter.normal_(std=0.3)
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    place = Path("none")
    return Trained(recipe=recipe, model=model, form=ready.form, weights=place, folder=place)


def random_network(*, fold=True, equilibria=False, **options):
    """The network of a run with random weights."""
    return read_network(random_run(**options), fold=fold, equilibria=equilibria)


def hostile(windows):
    """Windows with every kind of value that a float can have, in one place or all over."""
    values = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0, 1e10, 65504.0)
    spoiled = windows[:1].repeat(2 * len(values), 1, 1)
    for i, value in enumerate(values):
        spoiled[2 * i, 40, 3] = value
        spoiled[2 * i + 1] = value
    return spoiled


def compiler_of(case):
    """Each compiler has sanitizers of its own; both, where they are there, take their turn."""
    return "clang" if shutil.which("clang") and len(case) % 2 else "gcc"
