"""From the names of the command line to runs."""

from dataclasses import replace

import pytest

from fixpoint.training import Recipe, build_model, make_grid, prepare, run_experiment
from fixpoint.training.commands.grid import DEFAULT_SOLVERS, EQUILIBRIUM, STEPS, parse_solver


def grid(**options):
    settings = {
        "base": Recipe().changed(hidden=4),
        "datasets": ["har2-sample"],
        "models": ["ernn"],
        "solvers": list(DEFAULT_SOLVERS),
        "maps": None,
        "backwards": None,
        "seeds": [0],
    } | options
    return make_grid(settings.pop("base"), **settings)


def pairs(runs):
    models = [run.model for run in runs]
    return [(m.solver, m.max_iter, m.backward, m.map) for m in models]


def test_defaults_are_the_pairs_that_make_sense():
    assert pairs(grid()) == [
        ("inexact-newton", 1, "unrolled", "jordan"),
        ("inexact-newton", 2, "unrolled", "jordan"),
        ("picard", 30, "unrolled", "self-feedback"),
        ("picard", 30, "implicit", "self-feedback"),
        ("anderson", 30, "unrolled", "self-feedback"),
        ("anderson", 30, "implicit", "self-feedback"),
        ("broyden", 30, "unrolled", "self-feedback"),
        ("broyden", 30, "implicit", "self-feedback"),
    ]


def test_every_default_can_be_built(tiny):
    for run in grid():
        model = build_model(run, tiny)
        assert model(tiny.x_test[:2]).shape == (2, 2)


def settings(run, names):
    return {name: run.flat[name] for name in names}


def test_both_kinds_of_models_start_where_the_search_found():
    for run in grid():
        start = STEPS if run.model.solver == "inexact-newton" else EQUILIBRIUM
        assert settings(run, start) == start
        other = EQUILIBRIUM if start is STEPS else STEPS
        for name in other.keys() - start.keys():
            assert run.flat[name] in (None, Recipe().flat[name])


def test_a_setting_that_is_asked_for_is_kept():
    base = Recipe().changed(bound=0.9, nonlinearity="tanh")
    (run,) = grid(base=base, solvers=["picard"], backwards=["implicit"])
    kept = {"bound": 0.9, "nonlinearity": "tanh"}
    assert settings(run, EQUILIBRIUM) == EQUILIBRIUM | kept
    default = Recipe().training.lr
    (run,) = grid(solvers=["picard"], backwards=["implicit"], given={"lr"})
    assert settings(run, EQUILIBRIUM) == EQUILIBRIUM | {"lr": default}


def test_another_init_has_no_settings_of_the_identity():
    base = Recipe().changed(init="normal")
    (run,) = grid(base=base, solvers=["picard"], backwards=["implicit"])
    assert run.model.input_gain is None
    assert run.training.recurrent_lr == 1


def test_the_first_loss_of_equilibria_is_near_guessing():
    recipe = Recipe().changed(epochs=1)
    (run,) = grid(base=recipe, solvers=["picard"], backwards=["implicit"])
    record = run_experiment(run, prepare(run).data)
    assert record["loss"] < 1.5 * record["guessing_loss"]


def test_models_without_a_search_keep_their_defaults():
    for run in grid(models=["lstm"]) + grid(solvers=["picard"], maps=["linear"]):
        assert run.training == Recipe().training
        assert run.model.init is None


def test_seeds_multiply_the_runs():
    runs = grid(solvers=["picard"], backwards=["implicit"], seeds=[3, 1, 3])
    assert [run.training.seed for run in runs] == [3, 1]
    assert len({run.key for run in runs}) == 2


def test_what_is_asked_for_reaches_every_run():
    base = Recipe().changed(hidden=5, epochs=7, batch_size=9, lr=0.5, clip=2.0, device="cuda")
    for run in grid(base=base, datasets=["har2"]):
        assert replace(run.training, recurrent_lr=1.0) == base.training
        assert (run.model.hidden, run.data.dataset, run.machine.device) == (5, "har2", "cuda")
    assert pairs(grid(solvers=["picard:7"], backwards=["unrolled"], maps=["linear"])) == [
        ("picard", 7, "unrolled", "linear")
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"solvers": ["inexact-newton"], "backwards": ["implicit"]},
            r"eta receives no gradient under Implicit: use Unrolled\(\)",
        ),
        (
            {"solvers": ["picard"], "maps": ["jordan"]},
            "JordanMap sees .* or the self-feedback map",
        ),
    ],
)
def test_a_pair_that_was_asked_for_is_refused_when_built(tiny, options, message):
    (run, *_) = grid(**options)
    with pytest.raises(ValueError, match=message):
        build_model(run, tiny)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maps": ["jordon"]}, "unknown map 'jordon'.*mean 'jordan'"),
        ({"backwards": ["implict"]}, "unknown backward.*mean 'implicit'"),
        ({"models": ["lstn"]}, "unknown model.*mean 'lstm'"),
        ({"solvers": ["picrd"]}, "unknown solver.*mean 'picard'"),
    ],
)
def test_an_unknown_name_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        grid(**options)


def test_the_grid_is_the_product():
    runs = grid(
        datasets=["har2", "har6"],
        models=["lstm", "ernn"],
        solvers=["picard", "anderson"],
        maps=["self-feedback", "linear"],
        backwards=["unrolled", "implicit"],
        seeds=[0, 1],
    )
    assert len(runs) == len({run.key for run in runs}) == 2 * 2 * (1 + 2 * 2 * 2)
    assert [run.label for run in runs[:3]] == ["LSTM", "LSTM", "ERNN (Picard, self-feedback)"]
    bounds = {(run.model.map, run.model.bound) for run in runs if run.model.model == "ernn"}
    assert bounds == {("self-feedback", EQUILIBRIUM["bound"]), ("linear", 0.8)}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("inexact-newton", ("inexact-newton", None)),
        ("inexact-newton:3", ("inexact-newton", 3)),
        ("picard", ("picard", None)),
        ("anderson:12", ("anderson", 12)),
    ],
)
def test_parse_solver(spec, expected):
    assert parse_solver(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("picrd", "unknown solver 'picrd': expected one of .*; did you mean 'picard'"),
        ("picard:", "NAME or NAME:MAX_ITER with MAX_ITER >= 1; got 'picard:', try picard:2"),
        ("picard:0", "got 'picard:0'"),
        ("picard:-1", "got 'picard:-1'"),
        ("picard:x", "got 'picard:x'"),
        ("picard:1.5", r"got 'picard:1\.5'"),
    ],
)
def test_parse_solver_refuses(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_solver(spec)
