"""From the options of a recipe to a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fixpoint import Implicit, Phantom, Unrolled
from fixpoint._messages import unknown_name
from fixpoint.backward import Backward
from fixpoint.data import Dataset
from fixpoint.models import (
    ERNN,
    EURNN,
    GRU,
    LSTM,
    MAPS,
    RNN,
    UGRNN,
    EquilibriumMap,
    FastGRNN,
    FastRNN,
    JordanMap,
    LanguageModel,
    LastStateClassifier,
    RecurrentDropout,
    SpectralRNN,
    chrono_biases_,
    identity_transition_,
    scale_recurrence_,
)
from fixpoint.solvers import SOLVERS
from fixpoint.training.recipe.defaults import fill_defaults
from fixpoint.training.recipe.plugins import load_plugin, named
from fixpoint.training.recipe.schema import Model, Recipe

BACKWARDS: dict[str, type[Backward]] = {
    "unrolled": Unrolled,
    "implicit": Implicit,
    "phantom": Phantom,
}

INITS = ("normal", "identity")
GATE_INITS = ("chrono",)

OWN = (
    *("nonlinearity", "map", "solver", "max_iter", "backward", "rtol", "eta", "bound", "rank"),
    *("init", "input_gain", "recurrent_gain", "reflections", "capacity"),
)
"""Options that some layers take and others refuse."""


class Layer(NamedTuple):
    """Constructor of a recurrent layer of options, input_size and timesteps; which options of `OWN`
    it takes."""

    build: Callable[[Model, int, int], nn.Module]
    takes: tuple[str, ...]


def _standard(layer: Callable[..., nn.Module], **names: str) -> Layer:
    """Return a layer like torch.nn.RNN; `names` are its options of `OWN` under the names that it
    uses.
    """

    def build(options: Model, input_size: int, timesteps: int) -> nn.Module:
        values = {own: getattr(options, name) for name, own in names.items()}
        given = {own: value for own, value in values.items() if value is not None}
        if options.num_layers > 1:
            given["num_layers"] = options.num_layers
        return layer(input_size, options.hidden, batch_first=True, **given)

    return Layer(build, tuple(names))


def _gated(layer: Callable[..., nn.Module], **names: str) -> Layer:
    """Return a layer as `_standard` does, the start of whose gates is an option."""
    standard = _standard(layer, **names)

    def build(options: Model, input_size: int, timesteps: int) -> nn.Module:
        made = standard.build(options, input_size, timesteps)
        if options.init is None:
            return made
        if options.init not in GATE_INITS:
            raise ValueError(unknown_name(f"init of {options.model}", options.init, GATE_INITS))
        if timesteps < 2:
            raise ValueError(
                "model.init = 'chrono' needs sequences of at least 2 time steps (of a text, "
                f"training.bptt); got {timesteps}: leave model.init out"
            )
        return chrono_biases_(made, timesteps)

    return Layer(build, (*standard.takes, "init"))


def _ernn(options: Model, input_size: int, timesteps: int) -> nn.Module:
    options = resolve(options)
    of_solver: dict[str, Any] = {"max_iter": options.max_iter}
    if options.rtol is None:
        of_solver |= {"timesteps": timesteps, "eta": 0.01 if options.eta is None else options.eta}
    else:
        of_solver |= {"rtol": options.rtol, "atol": 0.1 * options.rtol}
    names = ("nonlinearity", "bound", "rank", "init", "input_gain")
    of_map = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    phi: Any = _make_map(str(options.map), input_size, options.hidden, of_map)
    if options.num_layers > 1:
        if options.map != "jordan":
            raise ValueError(
                f"the {options.map} map has one layer; got model.num_layers="
                f"{options.num_layers}: take the jordan map, or one layer"
            )
        phi, of_map = "jordan", of_map | {"num_layers": options.num_layers}
    else:
        of_map = {}
    layer = ERNN(
        input_size,
        options.hidden,
        map=phi,
        solver=named("solver", str(options.solver), SOLVERS)(**of_solver),
        backward=BACKWARDS[str(options.backward)](),
        batch_first=True,
        **of_map,
    )
    if options.recurrent_gain is not None:
        if options.map != "jordan":
            raise ValueError(
                f"the {options.map} map has no recurrent_gain; leave model.recurrent_gain out"
            )
        for cell in layer.cells():
            scale_recurrence_(cast(JordanMap, cell.map), options.recurrent_gain)
    return layer


LAYERS: dict[str, Layer] = {
    "ernn": Layer(_ernn, tuple(name for name in OWN if name not in ("reflections", "capacity"))),
    "rnn": _standard(RNN, nonlinearity="nonlinearity"),
    "lstm": _gated(LSTM),
    "gru": _gated(GRU),
    "fastrnn": _standard(FastRNN, nonlinearity="nonlinearity", rank="rank"),
    "fastgrnn": _standard(FastGRNN, nonlinearity="nonlinearity", rank="rank"),
    "ugrnn": _gated(UGRNN, nonlinearity="nonlinearity"),
    "spectralrnn": _standard(SpectralRNN, nonlinearity="nonlinearity", reflections="reflections"),
    "eurnn": _standard(EURNN, capacity="capacity"),
}
"""Every model by the name that recipes and the command line take."""


_BUILT_IN = tuple(MAPS)


def _find_layer(name: str) -> Layer:
    """Return how to build the model of that name, or of a class called like torch.nn.RNN."""
    found = named("model", name, LAYERS)
    return found if isinstance(found, Layer) else _standard(found)


def resolve(options: Model) -> Model:
    """Replace None by the defaults of an ERNN, after its plugins are loaded and names are checked.

    Raises:
        ValueError: a name is unknown, or an option belongs to another model.
    """
    for place in options.plugins:
        load_plugin(place)
    takes = _find_layer(options.model).takes
    for name in OWN:
        if name not in takes and getattr(options, name) is not None:
            own = f": its own options are {', '.join(takes)}" if takes else ""
            raise ValueError(
                f"{options.model} has no {name}{own}; leave model.{name} out, or where a recipe "
                f"sets it give --set model.{name}=none"
            )
    if options.model != "ernn":
        return options
    filled: Model = fill_defaults(options)
    named("solver", str(filled.solver), SOLVERS)
    named("map", str(filled.map), MAPS)
    if filled.backward not in BACKWARDS:
        raise ValueError(unknown_name("backward", str(filled.backward), BACKWARDS))
    learned = filled.solver == "inexact-newton"
    without = "rtol" if learned else "eta"
    if getattr(filled, without) is not None:
        raise ValueError(f"the solver {filled.solver} has no {without}; leave model.{without} out")
    return filled


def resolved(recipe: Recipe) -> Recipe:
    """Return the recipe with the defaults of its model filled in and its names checked."""
    return replace(recipe, model=resolve(recipe.model))


def make_model(options: Model, data: Dataset, *, bptt: int = 300) -> nn.Module:
    """Return the untrained model: a classifier of the last state, or a language model for a text.

    Args:
        options: the section `model` of a recipe.
        data: what it is for; gives the number of features, time steps and classes.
        bptt: time steps that a language model sees at once.

    Raises:
        ValueError: a name is unknown, or options do not go together.

    Example:
        >>> from fixpoint.data import load_dataset
        >>> from fixpoint.training import Recipe, make_model
        >>> recipe = Recipe().changed(model="lstm", hidden=8)
        >>> model = make_model(recipe.model, load_dataset("har2-sample"))
        >>> type(model.layer).__name__
        'LSTM'
    """
    options = resolve(options)
    words = len(data.vocabulary)
    if data.kind == "language-model":
        layer = _layer(options, options.hidden, bptt)
        counts = None
        if options.word_frequencies:
            counts = torch.bincount(data.x_train.flatten().long(), minlength=words)
        return LanguageModel(layer, options.hidden, words, tied=options.tied, counts=counts)
    for name in ("tied", "word_frequencies"):
        if getattr(options, name):
            raise ValueError(
                f"{name} is for language models; {data.name} has classes: leave it out"
            )
    _, timesteps, *channels = data.x_train.shape
    layer = _layer(options, channels[0] if channels else options.hidden, timesteps)
    vocabulary = None if channels else words
    return LastStateClassifier(layer, options.hidden, len(data.classes), vocabulary=vocabulary)


def _layer(options: Model, input_size: int, timesteps: int) -> nn.Module:
    layer = _find_layer(options.model).build(options, input_size, timesteps)
    fractions = {
        "inputs": options.input_dropout,
        "weights": options.weight_dropout,
        "outputs": options.output_dropout,
    }
    return RecurrentDropout(layer, **fractions) if any(fractions.values()) else layer


def _make_map(name: str, input_size: int, hidden: int, options: dict[str, Any]) -> EquilibriumMap:
    owners = {
        "rank": ("jordan",),
        "bound": ("self-feedback", "linear", "manifold"),
        "init": ("self-feedback", "linear"),
        "input_gain": ("self-feedback", "linear"),
        "nonlinearity": ("jordan", "self-feedback", "identity-feedback", "manifold"),
    }
    kind = named("map", name, MAPS)
    for option in options:
        own = option in inspect.signature(kind).parameters
        if name not in owners[option] and not (own and name not in _BUILT_IN):
            raise ValueError(f"the {name} map has no {option}; leave model.{option} out")
    if options.get("bound") == 0:
        del options["bound"]
    init = options.pop("init", "normal")
    if init not in INITS:
        raise ValueError(unknown_name(f"init of the {name} map", init, INITS))
    gain = options.pop("input_gain", None)
    if gain is not None and init != "identity":
        raise ValueError("model.input_gain needs model.init = 'identity': set it, or leave it out")
    made: EquilibriumMap = kind(input_size, hidden, **options)
    return made if init == "normal" else identity_transition_(made, input_gain=gain or 1.0)
