"""Loggers of Lightning, by stand-ins for the packages that they need."""

import sys
from types import SimpleNamespace

import pytest

from fixpoint.training import Epoch
from fixpoint.training.results.logs import LOGGERS, Logs


@pytest.fixture
def made(monkeypatch):
    """Loggers that were made, with what was logged."""
    made = []

    class Logger:
        def __init__(self, **options):
            self.options, self.logged, self.experiment = options, [], object()
            made.append(self)

        def log_metrics(self, numbers, step):
            self.logged.append((step, numbers))

        def save(self):
            pass

        def finalize(self, status):
            self.status = status

    loggers = SimpleNamespace(MLFlowLogger=Logger, WandbLogger=Logger)
    mlflow = SimpleNamespace(get_tracking_uri=lambda: "sqlite:///mlflow.db")
    monkeypatch.setitem(sys.modules, "pytorch_lightning.loggers", loggers)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return made


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_each_epoch_is_logged_under_the_name_of_the_run(name, made, tmp_path):
    logs = Logs(tmp_path / "0a1b", [name])
    for number in (1, 2):
        logs.add(Epoch(number, 0.5, 0.4, 90.0, None, 2.0, 0.01))
    logs.finish()
    (logger,) = made
    assert logger.status == "success"
    assert "0a1b" in logger.options.values()
    expected = {"train_loss": 0.5, "test_loss": 0.4, "accuracy": 90.0, "seconds": 2.0, "lr": 0.01}
    assert logger.logged == [(1, expected), (2, expected)]


def test_mlflow_writes_where_mlflow_says(made, tmp_path):
    LOGGERS["mlflow"](tmp_path)
    assert made[0].options["tracking_uri"] == "sqlite:///mlflow.db"


def test_a_logger_that_does_not_start(monkeypatch, tmp_path):
    def refuse(**options):
        raise RuntimeError("no such\n server")

    loggers = SimpleNamespace(WandbLogger=refuse)
    monkeypatch.setitem(sys.modules, "pytorch_lightning.loggers", loggers)
    with pytest.raises(ValueError, match="^--logger wandb cannot start: no such server$"):
        LOGGERS["wandb"](tmp_path)


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_package_that_is_missing(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pytorch_lightning.loggers", None)
    with pytest.raises(ImportError, match=f"--logger {name} needs"):
        LOGGERS[name](tmp_path)
