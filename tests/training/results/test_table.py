"""The table of a comparison and its findings in words."""

import copy
import re

import pytest
from rich.console import Console

from fixpoint.models import MAPS
from fixpoint.solvers import SOLVERS
from fixpoint.training import Recipe
from fixpoint.training.engine.model_factory import BACKWARDS
from fixpoint.training.recipe.names import SOLVERS as SOLVER_NAMES
from fixpoint.training.results.description import BACKWARDS as BACKWARD_WORDS
from fixpoint.training.results.description import describe
from fixpoint.training.results.table import FittingTable, comparison_table
from fixpoint.training.results.verdict import findings

RECORD = {
    "key": "k",
    "label": "ERNN (Picard, self-feedback)",
    "run": {
        "dataset": "har2-sample",
        "model": "ernn",
        "solver": "picard",
        "max_iter": 30,
        "map": "self-feedback",
        "backward": "implicit",
        "hidden": 4,
        "epochs": 6,
        "lr": 0.01,
        "seed": 0,
    },
    "metric": "accuracy",
    "accuracy_last": 90.0,
    "accuracy_best": 92.0,
    "accuracy_chosen": None,
    "loss": 0.25,
    "guessing_loss": 0.693,
    "seconds_per_epoch": 1.5,
    "peak_memory_mib": None,
    "parameters": 1234,
    "size_kb": 4.82,
    "mean_iterations": 5.25,
    "mean_residual": 0.0005,
    "gap": [0.0001, 0.0004, 0.002],
    "fraction_converged": 0.995,
    "epochs": [{}] * 6,
    "contraction": {
        "before": {"fraction_holding": 1.0},
        "after": {"fraction_holding": 0.75, "eta": [[0.5], [-0.1]]},
    },
    "threads": 1,
    "versions": {"torch": "2.0"},
}


def printed(table, width=300):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def shown(*records, width=300):
    return printed(comparison_table(list(records)), width)


def changed(**changes):
    record = copy.deepcopy(RECORD)
    for name, value in changes.items():
        owner = record if name in record else record["run"]
        owner[name] = value
    return record


def test_one_row_holds_every_number():
    text = shown(RECORD)
    (row,) = [line.split() for line in text.splitlines() if line.startswith(" Picard")]
    assert row[-10:] == [
        *("90.00", "92.00", "0.250", "1.50", "0.0005", "5.2", "99.5", "75", "1234", "4.8")
    ]
    assert "implicit" in text
    assert "ERNN on har2-sample, 4 hidden units, 6 epochs, seed 0" in text


def test_a_small_residual_keeps_its_digits():
    text = shown(changed(mean_residual=1.23e-5), changed(mean_residual=3.21e-4, seed=1))
    assert "0.00017" in text
    assert "± 0.00022" in text


def test_seeds_share_a_row_as_mean_and_deviation():
    text = shown(RECORD, changed(seed=1, accuracy_last=94.0))
    (row,) = [i for i, line in enumerate(text.splitlines()) if "Picard" in line and "92.00" in line]
    first, second = text.splitlines()[row : row + 2]
    assert "92.00" in first
    assert "± 2.83" in second  # the s.d. of 90 and 94, n - 1 in the denominator
    assert "1234 ±" not in text
    assert "2 seeds" in text


def test_configurations_have_rows_of_their_own():
    text = shown(RECORD, changed(backward="unrolled"), changed(solver="broyden", map="linear"))
    assert [line.split()[:2] for line in text.splitlines() if "90.00" in line] == [
        ["Picard", "implicit"],
        ["Picard", "unrolled"],
        ["Broyden", "implicit"],
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120])
def test_no_number_is_cut(width):
    """Columns that do not fit are left out, the least important first, and named."""
    text = shown(RECORD, changed(seed=1, accuracy_last=94.0), width=width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert "92.00" in text
    assert "± 2.83" in " ".join(text.split())
    numbers = set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", text)) - {"2.0"}
    assert numbers <= {"92.00", "2.83", "0.250", "1.50", "0.0005", "5.2", "99.5", "4.8"}
    if 20 < width < 120:
        assert "Not shown, the terminal is too narrow:" in " ".join(text.split())


def test_names_are_text_not_markup():
    text = printed(
        FittingTable("[bold]x[/bold]", ["a [/b]"], ["n"], [(["slow [m/s] \x1b[31m"], ["1"])])
    )
    assert "[bold]x[/bold]" in text
    assert "slow [m/s] \\x1b[31m" in text
    assert "\x1b" not in text


def test_a_comparison_of_solvers_on_different_maps_says_so():
    other = changed(solver="inexact-newton", map="jordan", max_iter=1)
    text = " ".join(shown(RECORD, other).split())
    assert "Rows of different maps are different models" in text
    assert "different maps" not in shown(RECORD, changed(solver="anderson"))


def test_each_model_is_described_once():
    steps = changed(solver="inexact-newton", map="jordan", max_iter=2, backward="unrolled")
    steps["run"] |= {"rank": 8, "rtol": None, "bound": None}
    other = changed(seed=1)
    text = shown(RECORD, other, steps, width=400)
    one = (
        "Picard implicit: h = tanh(U h + V h_prev + W x + b), solved by "
        "Picard, at most 30 updates; gradient by an adjoint solve at the solution."
    )
    assert text.count(one) == 1
    assert (
        "K=2: 2 steps h + eta (phi - h) from h_prev, eta "
        "learned, phi = relu((I + U)(V h + W x + b)), U of rank 8; gradient through the updates."
    ) in text


def test_rows_that_differ_in_solver_or_backward_share_a_description():
    kinds = [(s, b) for s in ("picard", "anderson") for b in ("unrolled", "implicit")]
    rows = [changed(solver=solver, backward=backward) for solver, backward in kinds]
    text = shown(*rows, changed(map="linear"), width=400)
    assert text.count("h = tanh(U h + V h_prev + W x + b)") == 1
    assert (
        "Picard unrolled, ERNN (Picard, self-feedback), implicit, Anderson: h = tanh(U h + "
        "V h_prev + W x + b), solved, at most 30 updates; gradient through the updates (unrolled) "
        "or by an adjoint solve at the solution (implicit)."
    ) in text


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_every_name_has_a_description(solver, name, backward):
    run = Recipe().changed(solver=solver, map=name, backward=backward).flat
    text = describe(run | {"max_iter": 3})
    assert (name == "linear") == ("relu(" not in text and "tanh(" not in text)
    assert text.endswith(BACKWARD_WORDS[backward])
    assert SOLVER_NAMES[solver] in text or "3 steps" in text


def test_findings_name_the_condition_and_negative_steps():
    text = findings(RECORD)
    assert text.startswith("ERNN (Picard, self-feedback), implicit: ")
    assert "< 1 at 75 % of the states examined (100 % before training)" in text
    assert "1 of 2 etas examined are negative" in text
    assert "This layer equilibrates: its states solve h = phi(h)." in text
    positive = copy.deepcopy(RECORD)
    positive["contraction"]["after"]["eta"] = [[0.5], [0.1]]
    assert "negative" not in findings(positive)


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [
        ([0.1, 0.93, 1.0], "integrates its input over time, it does not equilibrate"),
        ([0.001, 0.05, 0.2], "equilibrates in part"),
        ([0.0, 0.001, 0.009], "This layer equilibrates: "),
    ],
)
def test_compare_and_diagnose_give_one_verdict(gap, verdict):
    from fixpoint.analysis.gap_verdict import equilibrium_verdict

    assert verdict in findings(changed(gap=gap))
    assert equilibrium_verdict(gap)[1] in findings(changed(gap=gap))


def test_a_diverged_run_is_said():
    lost = changed(loss=None, contraction=None, epochs=[{}] * 2)
    assert findings(lost) == (
        "ERNN (Picard, self-feedback), implicit: The training diverged in epoch 2 of 6 and was "
        "stopped: its loss is not finite; lower training.lr (0.01) or set training.clip."
    )
    assert "diverged" in shown(lost)
    huge = findings(changed(loss=4e34))
    assert "The training diverged: its loss is 4e+34, that of guessing 0.69" in huge
    assert "4e+34" in shown(changed(loss=4e34))
    assert "diverged" not in findings(changed(loss=0.9))
    first = {"loss": 90.0, "epochs": [{}]}  # the mean of an epoch that began far away
    assert "diverged" not in findings(changed(**first, accuracy_last=85.0))
    assert "diverged" in findings(changed(**first, accuracy_last=51.0))
