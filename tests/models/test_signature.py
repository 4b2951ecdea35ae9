"""What `help` and editors show of classes that pass options on."""

import inspect
import pydoc

import pytest
import torch

from fixpoint.models import (
    ERNN,
    EURNN,
    UGRNN,
    ERNNCell,
    FastGRNN,
    FastRNN,
    FastRNNCell,
    JordanMap,
    LinearMap,
    SpectralRNN,
)

LAYER = ["input_size", "hidden_size", "num_layers", "nonlinearity", "bias", "batch_first"]
LAYER += ["dropout", "bidirectional"]
FACTORY = {"device", "dtype"}
LEAKY = {"implementation", "recompute", "time"}


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (ERNN, LEAKY | {"map", "max_iter", "timesteps", "rank", "solver", "backward"}),
        (FastRNN, LEAKY | {"rank"}),
        (SpectralRNN, LEAKY | {"reflections", "radius"}),
        (FastGRNN, {"rank", "implementation", "time"}),
        (UGRNN, {"implementation", "time"}),
        (EURNN, {"style", "capacity", "time"}),
    ],
)
def test_a_layer_shows_the_options_of_its_cell(cls, options):
    parameters = inspect.signature(cls).parameters
    assert list(parameters)[: len(LAYER)] == LAYER
    assert set(parameters) - set(LAYER) == options | FACTORY
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in options)
    shown = pydoc.render_doc(cls, renderer=pydoc.plaintext).splitlines()
    assert all(name in " ".join(shown[:20]) for name in options)


def test_defaults_are_those_of_the_constructor_that_takes_them():
    parameters = inspect.signature(FastRNNCell).parameters
    assert parameters["nonlinearity"].default == "tanh"
    assert parameters["recompute"].default is False
    assert set(inspect.signature(LinearMap).parameters) == {
        *("input_size", "hidden_size", "inverse", "bound", "nonlinearity", "bias"),
        *FACTORY,
    }
    assert "options" not in inspect.signature(JordanMap).parameters


def test_an_instance_has_the_signature_of_its_call():
    signature = inspect.signature(FastRNNCell(2, 3))
    assert "input_size" not in signature.parameters
    assert FastRNNCell(2, 3)(torch.zeros(1, 2)).shape == (1, 3)


@pytest.mark.parametrize("cls", [ERNN, FastRNN, UGRNN, JordanMap])
def test_an_unknown_option_is_refused(cls):
    with pytest.raises(TypeError, match="recompile"):
        cls(2, 3, recompile=True)


@pytest.mark.parametrize(
    ("cls", "letter", "option"),
    [
        (ERNN, "K", "max_iter"),
        (ERNN, "T", "timesteps"),
        (FastRNN, "r", "rank"),
        (ERNNCell, "K", "max_iter"),
        (FastRNNCell, "r", "rank"),
        (JordanMap, "r", "rank"),
    ],
)
def test_a_letter_of_a_paper_is_answered_by_the_option(cls, letter, option):
    with pytest.raises(TypeError, match=f"unknown {cls.__name__} option {letter!r}.*{option!r} he"):
        cls(2, 3, **{letter: 2})


def test_an_option_of_the_solver_is_answered_by_the_solver():
    with pytest.raises(TypeError, match=r"unknown ERNN option 'eta'.*solver=InexactNewton\(eta="):
        ERNN(2, 3, eta=0.1)
    with pytest.raises(TypeError, match=r"solver=Anderson\(rtol=\.\.\.\)"):
        ERNN(2, 3, tol=0.1)


def test_an_error_inside_a_constructor_of_a_user_is_left_as_it_is():
    class Mine(ERNN):
        def __init__(self, size, **options):
            super().__init__(size, options.pop("width"))
            torch.zeros(1, unheard=2)

    with pytest.raises(TypeError, match="zeros"):
        Mine(2, width=3)
