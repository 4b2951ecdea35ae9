"""A network read from a run computes what the model computes."""

from dataclasses import replace

import pytest
import torch
from support.random_runs import MODELS, NORMALIZATIONS, random_network, random_run

from fixpoint import Implicit
from fixpoint.export import read_network
from fixpoint.export.layers import read_layers
from fixpoint.models import ERNN, FastRNN
from fixpoint.training import Recipe
from fixpoint.training.commands.single_run import train_recipe


def reference(run):
    with torch.no_grad():
        return run.model(run.data.inputs(run.data.x_test[::8]))


def close(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_scores_are_those_of_the_model(options, windows):
    plain = {name: value for name, value in options.items() if name != "fold"}
    close(random_network(**options).scores(windows), reference(random_run(**plain)))


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_windows_are_in_the_units_of_the_sensor(normalize, windows):
    run = random_run(normalize=normalize)
    close(read_network(run).scores(windows), reference(run))


def test_training_with_rotations_has_the_same_normalization(windows):
    plain, rotated = (random_run(normalize="column", rotate=r) for r in (0.0, 30.0))
    close(read_network(rotated).scores(windows), read_network(plain).scores(windows))


def test_folding_saves_what_it_can():
    run = random_run(model="ernn", rank=2)
    folded, factors = (read_network(run, fold=fold).layers[0] for fold in (True, False))
    assert set(folded.matrices) == {"V", "W"}
    assert set(factors.matrices) == {"V", "W", "U1", "U2"}
    # 12 x 12, 12 x 9, the factors of U, and two products a unit for the update
    assert folded.multiplications == 144 + 108 + 24
    assert factors.multiplications == 144 + 108 + 48 + 24


def test_a_matrix_of_low_rank_is_folded_where_that_is_smaller():
    whole, factors = (read_layers(FastRNN(9, 12, rank=r), 5, fold=True)[0] for r in (6, 2))
    assert set(whole.matrices) == {"V", "W"}
    assert set(factors.matrices) == {"V1", "V2", "W1", "W2"}


def test_a_shared_eta_has_one_row():
    assert read_layers(ERNN(3, 4, max_iter=2), 7, fold=True)[0].gain.shape == (1, 2)
    assert read_layers(ERNN(3, 4, timesteps=7), 7, fold=True)[0].gain.shape == (7, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "eurnn"}, "EURNN has no device program; supported are ERNN .*FastRNN, FastGRNN"),
        (
            {"model": "ernn", "solver": "anderson"},
            "Anderson solves to a tolerance.*train with --solver inexact-newton",
        ),
        (
            {"model": "ernn", "map": "self-feedback", "max_iter": 2},
            "SelfFeedbackMap with max_iter=2 has no device program",
        ),
    ],
)
def test_other_models_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        random_network(**options)


def test_two_directions_are_refused():
    with pytest.raises(
        ValueError, match="ERNN reads each window in both directions; supported are"
    ):
        read_layers(ERNN(3, 4, bidirectional=True), 7, fold=True)


def test_sequences_of_different_lengths_are_refused():
    run = random_run()
    changed = replace(run, form=run.form._replace(lengths=True))
    with pytest.raises(ValueError, match=r"sequences of different lengths; .* cut the sequences"):
        read_network(changed)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """Folder of a run of 2 epochs, stopped after the first."""
    out = tmp_path_factory.mktemp("runs")
    recipe = Recipe().changed(model="rnn", hidden=4, epochs=2)

    def stop(epoch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_recipe(recipe, out, stop)
    return out / recipe.key


def test_an_unfinished_run_is_refused(unfinished):
    with pytest.raises(ValueError, match=r"not finished, it has 1 of 2 epochs: run `fixpoint"):
        read_network(unfinished)


def test_a_checkpoint_of_an_unfinished_run_is_exported(unfinished):
    assert read_network(unfinished / "epoch-0001").state_size == 4


def test_equilibria_are_read_for_a_graph_alone():
    layers = {
        name: ERNN(3, 4, map="self-feedback", solver=name, backward=Implicit())
        for name in ("anderson", "newton")
    }
    with pytest.raises(ValueError, match="export it --to onnx"):
        read_layers(layers["anderson"], 7, fold=True)
    with pytest.raises(ValueError, match="Newton cannot be in a graph for any batch: train with"):
        read_layers(layers["newton"], 7, fold=True, equilibria=True)
    (layer,) = read_layers(layers["anderson"], 7, fold=True, equilibria=True)
    x, h = torch.randn(2, 5, 3), torch.zeros(5, 4)
    with torch.no_grad():
        output, _ = layers["anderson"](x)
        for t in range(2):
            h = layer.step(x[t], h, t)
            torch.testing.assert_close(h, output[t], rtol=1e-4, atol=1e-5)
