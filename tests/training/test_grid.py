"""From the names of the command line to runs."""

import pytest

from fixpoint.training import build, make_grid
from fixpoint.training.grid import DEFAULT_SOLVERS, parse_solver


def grid(**options):
    settings = {
        "dataset": "har2-sample",
        "solvers": list(DEFAULT_SOLVERS),
        "backwards": None,
        "cell": None,
        "seeds": [0],
        "epochs": 6,
        "hidden": 4,
        "batch_size": 128,
        "lr": 1e-2,
        "device": "cpu",
    }
    return make_grid(**settings | options)


def pairs(runs):
    return [(run.solver, run.max_iter, run.backward, run.cell) for run in runs]


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
        model = build(run, tiny)
        assert model(tiny.x_test[:2]).shape == (2, 2)


def test_seeds_multiply_the_runs():
    runs = grid(solvers=["picard"], backwards=["implicit"], seeds=[3, 1, 3])
    assert [run.seed for run in runs] == [3, 1]
    assert len({run.key for run in runs}) == 2


def test_what_is_asked_for_reaches_every_run():
    for run in grid(hidden=5, epochs=7, batch_size=9, lr=0.5, dataset="har2", device="cuda"):
        assert (run.hidden, run.epochs, run.batch_size, run.lr) == (5, 7, 9, 0.5)
        assert (run.dataset, run.device) == ("har2", "cuda")
    assert pairs(grid(solvers=["picard:7"], backwards=["unrolled"], cell="linear")) == [
        ("picard", 7, "unrolled", "linear")
    ]


@pytest.mark.parametrize(("epochs", "halve_every"), [(1, 1), (3, 1), (4, 2), (6, 2), (10, 4)])
def test_the_learning_rate_halves_at_most_twice(epochs, halve_every):
    (run,) = grid(solvers=["inexact-newton"], epochs=epochs)
    assert run.halve_every == halve_every
    assert (epochs - 1) // run.halve_every <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"solvers": ["inexact-newton"], "backwards": ["implicit"]},
            r"eta receives no gradient under Implicit: use Unrolled\(\)",
        ),
        ({"solvers": ["picard"], "cell": "jordan"}, "JordanCell sees .* or the self-feedback cell"),
        ({"solvers": ["picard"], "cell": "jordon"}, "unknown cell 'jordon'.*mean 'jordan'"),
        ({"solvers": ["picard"], "backwards": ["implict"]}, "unknown backward.*mean 'implicit'"),
    ],
)
def test_a_pair_that_was_asked_for_is_refused_when_built(tiny, options, message):
    (run, *_) = grid(**options)
    with pytest.raises(ValueError, match=message):
        build(run, tiny)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("inexact-newton", ("inexact-newton", 1)),
        ("inexact-newton:3", ("inexact-newton", 3)),
        ("picard", ("picard", 30)),
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
