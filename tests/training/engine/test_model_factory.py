"""From options to a model: the table of layers, and what each refuses."""

import pytest
import torch

from fixpoint.data import Dataset
from fixpoint.training import LAYERS, Recipe, make_model, run_experiment
from fixpoint.training.engine.model_factory import OWN, resolve


def options(**changes):
    return Recipe().changed(hidden=4, **changes).model


@pytest.mark.parametrize("name", LAYERS)
def test_every_model_classifies_windows(tiny, name):
    model = make_model(options(model=name), tiny)
    logits = model(tiny.x_test[:3])
    assert logits.shape == (3, 2)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_model_models_text(text, name, tied):
    model = make_model(options(model=name, tied=tied), text, bptt=6)
    words = text.x_train.view(2, 200)
    whole, _ = model(words[:, :6])
    first, state = model(words[:, :4])
    second, _ = model(words[:, 4:6], state)
    assert whole.shape == (2, 6, 7)
    if name != "ernn":  # whose eta depends on the step within a piece
        assert torch.allclose(torch.cat([first, second], 1), whole, atol=1e-6)


def test_a_text_model_starts_with_the_frequencies_of_its_words(text):
    model = make_model(options(tied=True, word_frequencies=True), text)
    counts = torch.stack([(text.x_train == word).sum() for word in range(7)])
    torch.testing.assert_close(model.bias.exp(), (counts + 1) / (len(text.x_train) + 7))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("option", OWN)
def test_an_option_is_taken_or_refused(tiny, name, option):
    value = {
        **{"nonlinearity": "relu", "map": "jordan", "solver": "inexact-newton"},
        **{"backward": "unrolled", "max_iter": 1, "rank": 2},
        **{
            "rtol": 0.1,
            "eta": 0.1,
            "bound": 0.5,
            "init": "identity" if name == "ernn" else "chrono",
            "input_gain": 0.5,
            "recurrent_gain": 0.5,
            "reflections": 2,
            "capacity": 2,
        },
    }[option]
    solver = "picard" if option in ("rtol", "bound", "init", "input_gain") else None
    given = options(model=name, **{option: value})
    if option not in LAYERS[name].takes:
        with pytest.raises(ValueError, match=f"{name} has no {option}.*leave model.{option} out"):
            make_model(given, tiny)
        return
    if solver and name == "ernn":
        given = options(model=name, **{"init": "identity", "solver": solver, option: value})
    make_model(given, tiny)


def test_a_gain_scales_the_recurrence_of_every_layer(tiny):
    models = []
    for gain in (1.0, 0.5):
        torch.manual_seed(0)
        models.append(make_model(options(num_layers=2, recurrent_gain=gain), tiny))
    for plain, scaled in zip(*(model.layer.cells() for model in models), strict=True):
        torch.testing.assert_close(scaled.map.V, 0.5 * plain.map.V)
        torch.testing.assert_close(scaled.map.W, plain.map.W)


def test_gates_remember_up_to_the_length_of_a_sequence(tiny):
    torch.manual_seed(0)
    layer = make_model(options(model="ugrnn", init="chrono"), tiny).layer
    memory = 1 + layer.cells()[0].b[:4].exp()
    timesteps = tiny.x_train.shape[1]
    assert memory.min() >= 2
    assert 0.5 * timesteps < memory.max() <= timesteps


def test_defaults_of_ernn():
    resolved = resolve(options())
    assert (resolved.map, resolved.max_iter, resolved.backward) == ("jordan", 1, "unrolled")
    resolved = resolve(options(solver="anderson"))
    assert (resolved.map, resolved.max_iter, resolved.backward) == (
        "self-feedback",
        30,
        "implicit",
    )
    assert (resolved.rtol, resolved.bound) == (1e-3, 0.8)
    assert resolve(resolved) == resolved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "lstn"}, "unknown model 'lstn': expected one of .*did you mean 'lstm'"),
        ({"solver": "picard", "eta": 0.1}, "solver picard has no eta"),
        ({"rtol": 0.1}, "solver inexact-newton has no rtol"),
        ({"bound": 0.5}, "jordan map has no bound"),
        ({"init": "identity"}, "jordan map has no init"),
        ({"solver": "picard", "input_gain": 0.1}, "input_gain needs model.init = 'identity'"),
        ({"solver": "picard", "recurrent_gain": 0.1}, "self-feedback map has no recurrent_gain"),
        ({"solver": "picard", "init": "identiy"}, "unknown init .*did you mean 'identity'"),
        ({"model": "lstm", "init": "chrone"}, "unknown init of lstm .*did you mean 'chrono'"),
        ({"init": "chrono", "solver": "picard"}, "unknown init of the self-feedback map 'chrono'"),
        ({"map": "linear", "nonlinearity": "relu"}, "linear map has no nonlinearity"),
        ({"tied": True}, "tied is for language models"),
        ({"word_frequencies": True}, "word_frequencies is for language models"),
    ],
)
def test_what_does_not_go_together(tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        make_model(options(**changes), tiny)


def test_words_are_embedded_and_the_last_word_counts():
    """What comes after the end of a text changes nothing."""
    x = torch.tensor([[1, 2, 3, 0, 0, 0], [4, 5, 6, 1, 2, 3]])
    data = Dataset(
        name="words",
        kind="tokens",
        x_train=x,
        y_train=torch.tensor([0, 2]),
        lengths_train=torch.tensor([3, 6]),
        x_test=x,
        y_test=torch.tensor([0, 2]),
        lengths_test=torch.tensor([3, 6]),
        classes=("a", "b", "c"),
        vocabulary=tuple("0123456"),
        license="",
        citation="",
    )
    model = make_model(options(model="gru"), data)
    logits = model(x, data.lengths_train)
    assert logits.shape == (2, 3)
    assert torch.allclose(logits[:1], model(x[:1, :3]))
    assert torch.equal(logits[1:], model(x)[1:])
    record = run_experiment(Recipe().changed(model="gru", hidden=4, epochs=60, lr=0.05), data)
    assert record["accuracy_last"] == 100
