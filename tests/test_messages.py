"""What is said of unknown options: the known ones, and which one a letter of a paper stands for."""

import inspect

import numpy as np
import pytest
import torch

from fixpoint import (
    Anderson,
    FixedPoint,
    Implicit,
    InexactNewton,
    IterativeSolver,
    Phantom,
    Picard,
    Reversible,
    Root,
    Unrolled,
    make_solver,
    solve,
)
from fixpoint.models import DEQ, ERNN, EquilibriumMap, JordanMap
from fixpoint.sequence import solve_sequence
from fixpoint.training.recipe.schema import find_key


def half(z):
    return 0.5 * z + 1


LINEAR = torch.nn.Linear(2, 2)


def solve_from_zero(**options):
    return solve(half, torch.zeros(1, 1), **options)


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        (solve_from_zero, "K", r"solver=Anderson\(max_iter=\.\.\.\)"),
        (solve_from_zero, "tol", r"solver=Anderson\(rtol=\.\.\.\)"),
        (
            solve_from_zero,
            "max_itr",
            r"it is one of the solver: solver=Anderson\(max_iter=\.\.\.\)",
        ),
        (solve_from_zero, "eta", r"solver=InexactNewton\(eta=\.\.\.\)"),
        (solve_from_zero, "z_init", "'z_init' is 'z0' here"),
        (solve_from_zero, "backward", "FixedPoint has it"),
        (FixedPoint, "m", r"solver=Anderson\(memory=\.\.\.\)"),
        (FixedPoint, "backwards", "did you mean 'backward'"),
        (lambda **options: DEQ(LINEAR, **options), "f_max_iter", r"Anderson\(max_iter=\.\.\.\)"),
        (lambda **options: DEQ(LINEAR, **options), "f_solver", "'f_solver' is 'solver' here"),
        (lambda **options: DEQ(LINEAR, **options), "ift", "'ift' is 'backward' here"),
        (Implicit, "tol", r"solver=Anderson\(rtol=\.\.\.\)"),
        (Phantom, "grad", "'grad' is 'steps' here"),
        (Phantom, "tau", "'tau' is 'beta' here"),
        (Unrolled, "lats", "did you mean 'last'"),
        (Reversible, "slot", "did you mean 'slots'"),
        (solve_sequence, "n_iter", "'n_iter' is 'max_iter' here"),
        (InexactNewton, "alpha", "'alpha' is 'eta' here"),
    ],
)
def test_an_unknown_option_is_answered_by_the_known_ones(function, name, hint):
    with pytest.raises(TypeError, match=rf"^unknown \w+ option '{name}': expected one of .*{hint}"):
        function(**{name: 2})


def test_a_key_of_a_recipe_is_answered_too():
    for name, key in (("K", "max_iter"), ("learning_rate", "lr"), ("hidden_size", "hidden")):
        with pytest.raises(ValueError, match=f"; {name!r} is {key!r} here"):
            find_key(name)


def test_help_shows_the_signature():
    assert list(inspect.signature(solve).parameters) == [
        "phi",
        "z0",
        "solver",
        "t",
        "batched",
        "groups",
        "has_aux",
    ]
    assert list(inspect.signature(Phantom).parameters) == [
        "steps",
        "beta",
        "failed",
        "clip",
        "value",
    ]
    assert "backward" in inspect.signature(FixedPoint).parameters


def test_a_backward_of_a_user_answers_for_itself():
    class Mine(Implicit):
        def __init__(self, *, width: int = 1) -> None:
            super().__init__(None)

    class Passing(Implicit):
        def __init__(self, **options):
            super().__init__(**options)

    with pytest.raises(TypeError, match="unknown Mine option 'widht': expected one of width; did"):
        Mine(widht=2)
    with pytest.raises(TypeError, match="unknown Passing option 'tol'"):
        Passing(tol=2)
    assert Passing(reuse_factors=True).reuse_factors


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: make_solver(Anderson), r"solver is the class Anderson: give a ready one, Anderso"),
        (lambda: FixedPoint(half), r"solver must be a name or a Solver, as Anderson\(\); got <fun"),
        (
            lambda: FixedPoint(Picard(), 3),
            r"backward must be .*Phantom\(\); got 3",
        ),
        (lambda: FixedPoint(Picard(), Implicit), r"backward must be a ready one, as Implicit\(\)"),
        (
            lambda: solve(half, torch.zeros(1, 1), torch.zeros(9, 9)),
            r"solver must be a name or a Solver, as Anderson\(\); got torch.FloatTensor$",
        ),
        (lambda: solve(3, torch.zeros(1, 1)), "phi must be a function of z; got int: pass the fun"),
        (lambda: Root()(None, torch.zeros(1, 1)), "F must be a function of z; got NoneType"),
        (lambda: solve(torch.zeros(1, 1), half), "it holds .*half: the map comes before z0"),
        (
            lambda: ERNN(3, 8, map=JordanMap),
            r"the class JordanMap: .* ready one, JordanMap\(3, 8\)",
        ),
        (lambda: Picard(rtol="1e-3"), "rtol must be a number; got '1e-3'"),
        (lambda: Picard(atol=torch.ones(2)), "atol must be a number; got tensor"),
        (lambda: Picard(max_iter=True), "max_iter must be an integer; got True"),
    ],
)
def test_a_value_of_another_kind_is_named(build, text):
    with pytest.raises(TypeError, match=text):
        build()


def test_a_method_that_is_missing_is_named():
    class WithoutUpdate(IterativeSolver):
        pass

    class WithoutBind(EquilibriumMap):
        pass

    with pytest.raises(NotImplementedError, match=r"WithoutUpdate has no update\(k, z"):
        solve(half, torch.zeros(1, 1), WithoutUpdate())
    with pytest.raises(NotImplementedError, match=r"WithoutBind has no bind\(x\): define it"):
        ERNN(3, 8, map=WithoutBind(3, 8))(torch.zeros(5, 2, 3))


def test_numbers_of_numpy_are_numbers():
    solver = Anderson(max_iter=np.int64(7), memory=np.int32(3), rtol=np.float32(0.25))
    assert (solver.max_iter, solver.memory, solver.rtol) == (7, 3, 0.25)
    assert type(solver.max_iter) is int


def test_eta_is_finite():
    for eta in (float("nan"), -float("inf")):
        with pytest.raises(ValueError, match="eta must be finite"):
            InexactNewton(eta=eta)


def test_an_array_in_place_of_a_tensor_is_named():
    from fixpoint.models import ERNN

    with pytest.raises(TypeError, match=r"a tensor \(T, B, d\); got ndarray: torch.as_tensor"):
        ERNN(3, 4)(np.zeros((5, 2, 3)))


def test_a_gpu_is_cuda():
    from fixpoint.training import Recipe

    with pytest.raises(ValueError, match="'gpu': expected one of cpu, cuda, mps; did you mean 'cu"):
        Recipe().changed(device="gpu")


@pytest.mark.parametrize("steps", [{}, {"rtol": 0.0, "atol": 0.0}])
@pytest.mark.parametrize(
    ("result", "given"),
    [
        (lambda fz: fz, r"a tensor, \(3, 1\)$"),
        (lambda fz: (fz[:1], None), r"a tensor, \(1, 1\), as z$"),
        (lambda fz: (None, fz), "NoneType, as z$"),
        (lambda fz: None, "NoneType$"),
    ],
)
def test_another_result_of_an_update_is_refused(result, given, steps):
    class Mistaken(IterativeSolver):
        def update(self, k, z, fz, state):
            return result(fz)

    with pytest.raises(TypeError, match=rf"Mistaken.update must .* \(3, 1\), .* returned {given}"):
        solve(half, torch.zeros(3, 1), Mistaken(**steps))


def test_a_solver_without_its_options_is_refused():
    class Bare(IterativeSolver):
        def __init__(self):
            pass

    with pytest.raises(TypeError, match=r"Bare has no options: call super\(\).__init__"):
        FixedPoint(Bare())


def test_a_solver_shows_its_own_options():
    class HeavyBall(IterativeSolver):
        def __init__(self, *, momentum=0.3, **options):
            super().__init__(**options)
            self.momentum = momentum

    assert str(HeavyBall(momentum=0.5, min_iter=2)) == (
        "HeavyBall(max_iter=50, rtol=1e-05, atol=1e-06, momentum=0.5, min_iter=2)"
    )


def test_a_deq_refuses_a_numpy_array():
    with pytest.raises(TypeError, match=r"x must be a tensor.*holds numpy.ndarray: torch.as_te"):
        DEQ(lambda z, x: z, hidden_size=4)(torch.ones(3, 2).numpy())
