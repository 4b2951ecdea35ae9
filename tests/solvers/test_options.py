"""Options of solvers: what constructors and `with_options` check, and what help() shows."""

import inspect
import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from fixpoint import (
    RESULT_TEXT,
    STALL_TEXT,
    Anderson,
    InexactNewton,
    Newton,
    Picard,
    Result,
    SciPySolver,
    Solver,
    Stall,
    TorchDEQSolver,
    solve,
)

EVERY = ("max_iter", "rtol", "atol", "norm", "keep_best", "record", "check_every")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_itr": 3}, TypeError, "unknown .* option 'max_itr'.*did you mean 'max_iter'"),
        ({"rtol": -1}, ValueError, "rtol must be a finite number >= 0"),
        ({"atol": math.nan}, ValueError, "atol must be a finite number >= 0"),
        ({"max_iter": 2.5}, TypeError, "max_iter must be an integer"),
        ({"check_every": 0}, ValueError, "check_every must be at least 1"),
        ({"record": "all"}, ValueError, "record must be None"),
    ],
)
def test_with_options_checks_what_the_constructor_checks(build, options, error, text):
    with pytest.raises(error, match=text):
        build().with_options(**options)


def test_with_options_keeps_the_rest():
    solver = Anderson(memory=3, beta=0.5, rtol=1e-4)
    other = solver.with_options(max_iter=7)
    assert (other.memory, other.beta, other.rtol, other.max_iter) == (3, 0.5, 1e-4, 7)
    assert solver.max_iter == 50
    with pytest.raises(ValueError, match="memory must be at least 1"):
        solver.with_options(memory=0)
    assert not Newton().with_options(linear="gmres").unrollable


def test_with_options_shares_parameters():
    solver = InexactNewton(max_iter=3, rtol=1e-3)
    other = solver.with_options(max_iter=2)
    assert other.eta is solver.eta
    assert solver.learns_steps
    assert other.learns_steps
    assert not InexactNewton(learn=False).learns_steps
    for name, value in (("eta", 0.5), ("learn", False), ("timesteps", 4)):
        with pytest.raises(TypeError, match=f"{name} cannot change in a copy"):
            solver.with_options(**{name: value})
    with pytest.raises(ValueError, match="eta has 3 steps but max_iter=4"):
        solver.with_options(max_iter=4)


def test_signatures_name_every_option(build):
    names = list(inspect.signature(type(build())).parameters)
    assert set(EVERY) <= set(names)
    assert "options" not in names
    assert next(iter(inspect.signature(Picard).parameters)) == "beta"
    assert list(inspect.signature(Solver).parameters) == [
        "max_iter",
        "rtol",
        "atol",
        "norm",
        "leaf_atol",
    ]


@pytest.mark.parametrize("make", [lambda **o: TorchDEQSolver("anderson", **o), SciPySolver])
def test_solvers_of_others_have_no_option_of_the_loop(make):
    with pytest.raises(TypeError, match="unknown .* option 'check_every': expected one of"):
        make(check_every=2)


def test_a_solution_is_frozen_and_replaced_by_dataclasses():
    solution = solve(torch.cos, torch.zeros(1, 1))
    with pytest.raises(FrozenInstanceError):
        solution.evaluations = 3
    assert replace(solution, evaluations=3).evaluations == 3
    assert not hasattr(solution, "state")


@pytest.mark.parametrize(
    ("phi", "solver", "cause"),
    [
        (lambda z: 1 - z, Picard(), Stall.NO_PROGRESS),
        (lambda z: z + 1 + (z - 0.5).square(), Newton(), Stall.STEP_REFUSED),
        (lambda z: z + 1 + (z - 0.5).square(), SciPySolver(), Stall.GAVE_UP),
    ],
)
def test_each_cause_of_a_stall_has_its_own_remedy(phi, solver, cause):
    solution = solve(phi, torch.zeros(1, 1, dtype=torch.float64), solver)
    assert solution.result.item() == Result.STALLED
    assert solution.stall.item() == cause
    with pytest.raises(RuntimeError) as raised:
        solution.check()
    assert STALL_TEXT[cause] in str(raised.value)
    assert str(raised.value).startswith("1 of 1 samples did not converge: 1 STALLED (")


def test_every_code_has_a_text():
    assert set(RESULT_TEXT) == set(Result)
    assert set(STALL_TEXT) == set(Stall)
    assert len(set(STALL_TEXT.values())) == len(Stall)


@pytest.mark.parametrize(
    ("kind", "letter", "option"),
    [
        (InexactNewton, "K", "max_iter"),
        (InexactNewton, "T", "timesteps"),
        (Anderson, "m", "memory"),
        (Anderson, "tol", "rtol"),
        (Picard, "alpha", "beta"),
    ],
)
def test_a_letter_of_a_paper_is_answered_by_the_option(kind, letter, option):
    with pytest.raises(TypeError, match=f"option {letter!r}: .*; {letter!r} is {option!r} here"):
        kind(**{letter: 2})


def test_one_eta_for_each_update():
    for eta in ([0.1, 0.2], torch.tensor([0.1, 0.2])):
        assert InexactNewton(2, eta=eta).eta.tolist() == pytest.approx([0.1, 0.2])
        assert InexactNewton(2, timesteps=3, eta=eta).eta.shape == (3, 2)
    over_time = InexactNewton(1, timesteps=3, eta=[[0.1], [0.2], [0.3]]).eta
    assert over_time.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    for eta in ([0.1, 0.2], "much", None):
        with pytest.raises(ValueError, match=r"eta must be a number or one for each of the max_i"):
            InexactNewton(1, eta=eta)
