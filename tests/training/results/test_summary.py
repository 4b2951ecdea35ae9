"""The verdict of three lines, recall and F1, and the same sentence once."""

import pytest
import torch

from fixpoint.training.engine.tasks import balanced_weights, confusion_matrix, scores_by_class
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.results.confusion import by_class, confusion_table, total_confusion
from fixpoint.training.results.summary import summary
from fixpoint.training.results.verdict import shared_findings


def record(solver, accuracy, seconds, residual, *, seed=0, backward="implicit", holding=0.5):
    run = Recipe().changed(solver=solver, backward=backward, seed=seed, max_iter=1).flat
    return {
        "key": f"{solver}{seed}",
        "run": run | {"map": "self-feedback"},
        "metric": "accuracy",
        "accuracy_last": accuracy,
        "accuracy_best": accuracy,
        "accuracy_chosen": None,
        "loss": 0.3,
        "guessing_loss": 0.69,
        "seconds_per_epoch": seconds,
        "mean_residual": residual,
        "epochs": [{"seconds": seconds}, {"seconds": seconds}],
        "contraction": {
            "before": {"fraction_holding": 1.0},
            "after": {"fraction_holding": holding, "eta": [[0.1]]},
        },
        "classes": ["sit", "walk"],
        "confusion": [[90, 10], [5, 95]],
    }


ROWS = [
    record("inexact-newton", 95.0, 0.5, 0.9),
    record("picard", 94.0, 2.0, 0.001),
    record("anderson", 80.0, 40.0, 0.002),
]


def test_three_lines_say_what_is_best():
    accurate, fast, equilibrium = summary(ROWS)
    assert (
        accurate
        == "Most accurate: K=1, 95.00 %; as good, as far as one seed tells: Picard implicit."
    )
    assert fast == "Fastest: K=1, 0.50 s an epoch; Anderson implicit takes 80 times as long."
    assert equilibrium == (
        "At equilibrium (within 0.2 %): Picard implicit, Anderson implicit; not: K=1 (from 90 %)."
    )


def test_one_epoch_does_not_say_which_is_fastest():
    one = ROWS[0] | {"epochs": [{"seconds": 0.1}]}
    fast = summary([one, *ROWS[1:]])[1]
    assert fast == (
        "Fastest: not known from one epoch, which may compile: take --epochs 2 or more."
    )


def test_one_row_has_no_verdict():
    assert summary(ROWS[:1]) == []


def test_the_same_sentence_is_said_once():
    rows = [[row] for row in (ROWS[0], ROWS[1] | {"mean_residual": 0.7}, ROWS[2])]
    first, second = shared_findings(rows)
    assert first == (
        "K=1, Picard implicit: ||I + eta f'|| < 1 at 50 % of the states examined (100 % before "
        "training). The mean state is 0.7 to 0.9 of its norm away from equilibrium. These layers "
        "integrate their input over time, they do not equilibrate."
    )
    assert second.startswith("Anderson implicit: ")
    assert second.endswith("This layer equilibrates: its states solve h = phi(h).")


def test_each_seed_that_diverged_is_named_and_the_others_once():
    again = record("picard", 94.0, 2.0, 0.001, seed=1)
    rows = [[ROWS[1], again], [ROWS[0], ROWS[0] | {"loss": None}]]
    found = shared_findings(rows)
    assert [text.partition(": ")[0] for text in found] == ["Picard implicit", "K=1", "K=1"]
    assert "diverged in epoch 2" in found[2]


def test_recall_and_f1_are_those_of_the_matrix():
    y = torch.tensor([0] * 100 + [1] * 100)
    predicted = torch.tensor([0] * 90 + [1] * 10 + [0] * 5 + [1] * 95)
    matrix = confusion_matrix(y, predicted, 2)
    assert matrix.tolist() == [[90, 10], [5, 95]]
    found = scores_by_class(matrix, y)
    assert found["recall"] == [90.0, 95.0]
    # F1 = 2 P R / (P + R)
    P, R = 90 / 95, 0.9
    assert found["f1"][0] == pytest.approx(100 * 2 * P * R / (P + R))
    assert by_class(matrix.tolist())[0] == pytest.approx((90.0, found["f1"][0]))


def test_a_window_without_a_prediction_lowers_recall_and_f1():
    y = torch.tensor([0, 0, 1])
    found = scores_by_class(confusion_matrix(y[1:], y[1:], 2), y)
    assert found["recall"] == [50.0, 100.0]
    assert found["f1"][0] == pytest.approx(66.67, abs=0.01)


def test_a_class_without_windows_has_no_recall():
    y = torch.tensor([0, 1])
    found = scores_by_class(confusion_matrix(y, torch.tensor([0, 2]), 3), y)
    assert found["recall"] == [100.0, 0.0, None]
    assert found["macro_recall"] == 50.0


def test_matrices_of_seeds_are_added():
    assert total_confusion(ROWS[:2]) == [[180, 20], [10, 190]]
    assert total_confusion([{}]) is None
    assert confusion_table(ROWS[0]).rows[0] == (["sit"], ["90.0", "92.3", "90", "10"])


def test_balanced_weights_have_the_mean_1_over_windows():
    y = torch.tensor([0] * 9 + [1])
    weights = balanced_weights(y, 3)
    assert weights[y].mean() == pytest.approx(1.0)
    assert weights[1] / weights[0] == pytest.approx(9.0)
