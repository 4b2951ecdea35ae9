"""Optimizers by the names of a recipe: which parameters have which learning rate."""

import pytest
import torch

from fixpoint.training import LAYERS, Recipe, make_model
from fixpoint.training.engine.optim import Schedule, make_optimizer

RECURRENT = {
    "ernn": ["layer.l0.map.V", "layer.l0.map.U", "layer.l0.fixed_point.solver.eta"],
    "rnn": ["layer.weight_hh_l0"],
    "lstm": ["layer.weight_hh_l0"],
    "gru": ["layer.weight_hh_l0"],
    "fastrnn": ["layer.l0.V.full"],
    "fastgrnn": ["layer.l0.V.full"],
    "ugrnn": ["layer.l0.V"],
}


def model(data, **options):
    return make_model(Recipe().changed(hidden=4, **options).model, data)


def settings(**options):
    return Recipe().changed(optimizer="sgd", lr=0.5, **options).training


def moved(network, training):
    """How far a step moves each parameter whose gradient is 1."""
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer = make_optimizer(network, training)
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    steps = {name: before[name] - p.detach() for name, p in network.named_parameters()}
    return {name: round(step.mean().item(), 4) for name, step in steps.items()}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_matrices_and_steps_have_a_rate_of_their_own(tiny, name):
    steps = moved(model(tiny, model=name), settings(recurrent_lr=0.1))
    expected = {p: 0.05 if p in RECURRENT[name] else 0.5 for p in steps}
    assert steps == expected
    assert set(RECURRENT[name]) <= set(steps)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2},
        {"solver": "picard", "map": "self-feedback", "bound": 0.5},
        {"model": "fastrnn", "rank": 2},
    ],
)
def test_factors_and_bounded_matrices_have_it_too(tiny, options):
    steps = moved(model(tiny, **options), settings(recurrent_lr=0.0))
    still = {name for name, step in steps.items() if step == 0}
    parts = [name.split("l0.")[1] for name in still]
    assert (
        sorted(part for part in parts if "eta" not in part)
        == {
            2: ["map.U1", "map.U2", "map.V"],
            0.5: ["map.V", "map.parametrizations.U.original"],
            "fastrnn": ["V.left", "V.right"],
        }[options.get("model", options.get("bound", options.get("rank")))]
    )


def test_without_one_all_parameters_are_alike(tiny):
    assert set(moved(model(tiny), settings()).values()) == {0.5}
    assert len(make_optimizer(model(tiny), settings()).param_groups) == 1


def test_a_schedule_keeps_the_factor(tiny):
    training = settings(recurrent_lr=0.1, schedule="cosine", epochs=4)
    optimizer = make_optimizer(model(tiny), training)
    schedule = Schedule(optimizer, training)
    for _ in range(3):
        optimizer.step()
        schedule.step(None)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates[0] < 0.5
        assert rates[1] == pytest.approx(0.1 * rates[0])


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - RECURRENT.keys()))
def test_a_model_without_such_parameters_is_refused(tiny, name):
    with pytest.raises(ValueError, match="the model has none: leave it out"):
        make_optimizer(model(tiny, model=name), settings(recurrent_lr=0.1))
