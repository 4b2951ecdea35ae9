"""The table of a comparison and its findings in words."""

import copy

from rich.console import Console

from fixpoint.training.results.table import comparison_table, findings

RECORD = {
    "label": "picard",
    "run": {
        "dataset": "har2-sample",
        "cell": "self-feedback",
        "backward": "implicit",
        "hidden": 4,
        "epochs": 6,
        "seed": 0,
    },
    "metric": "accuracy",
    "accuracy_last": 90.0,
    "accuracy_best": 92.0,
    "loss": 0.25,
    "seconds_per_epoch": 1.5,
    "peak_memory_mib": None,
    "parameters": 1234,
    "size_kb": 4.82,
    "mean_iterations": 5.25,
    "mean_residual": 0.0005,
    "fraction_converged": 0.995,
    "contraction": {
        "before": {"fraction_holding": 1.0},
        "after": {"fraction_holding": 0.75, "eta": [[0.5], [-0.1]]},
    },
    "threads": 1,
    "versions": {"torch": "2.0"},
}


def shown(*records):
    """The table's rows, each a list of its cells' texts."""
    console = Console(width=300)
    with console.capture() as capture:
        console.print(comparison_table(list(records)))
    return capture.get()


def changed(**changes):
    record = copy.deepcopy(RECORD)
    for name, value in changes.items():
        owner = record if name in record else record["run"]
        owner[name] = value
    return record


def test_one_row_holds_every_number():
    text = shown(RECORD)
    (row,) = [line.split() for line in text.splitlines() if line.startswith(" picard")]
    assert row == [
        *("picard", "90.00", "92.00", "0.250", "1.50", "-", "1234", "4.8", "5.2", "0.0005", "99.5")
    ]
    assert "self-feedback, implicit" in text
    assert "har2-sample, 4 hidden units, 6 epochs, seed 0" in text


def test_seeds_share_a_row_as_mean_and_deviation():
    text = shown(RECORD, changed(seed=1, accuracy_last=94.0))
    (row,) = [i for i, line in enumerate(text.splitlines()) if "picard" in line]
    first, second = text.splitlines()[row : row + 2]
    assert first.split()[1] == "92.00"
    assert "± 2.83" in second  # the s.d. of 90 and 94, n - 1 in the denominator
    assert "1234 ±" not in text
    assert "2 seeds" in text


def test_configurations_have_rows_of_their_own():
    text = shown(RECORD, changed(backward="unrolled"), changed(label="broyden", cell="linear"))
    assert [line.split()[0] for line in text.splitlines() if "90.00" in line] == [
        "picard",
        "picard",
        "broyden",
    ]


def test_findings_name_the_condition_and_negative_steps():
    text = findings(RECORD)
    assert text.startswith("picard, implicit: ")
    assert "< 1 at 75 % of the states looked at (100 % before training)" in text
    assert "1 of 2 etas looked at are negative" in text
    assert "not an equilibrium" not in text


def test_findings_say_that_a_state_is_no_equilibrium():
    text = findings(changed(mean_residual=0.93))
    assert "the residual is 0.93 of the target" in text
    assert "it is not an equilibrium" in text
    positive = copy.deepcopy(RECORD)
    positive["contraction"]["after"]["eta"] = [[0.5], [0.1]]
    assert "negative" not in findings(positive)
