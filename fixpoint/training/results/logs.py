"""Logs written after each epoch besides the checkpoint: history.csv, other loggers."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fixpoint._messages import missing_extra, unknown_name
from fixpoint.training.engine.checkpoint import replace_file

if TYPE_CHECKING:
    from fixpoint.training.engine.fit import Epoch


class Logs:
    """`history.csv`, one line an epoch, and what other loggers write.

    Args:
        folder: of the run; made if need be.
        loggers: names in `LOGGERS`.

    Raises:
        ImportError: its package is not installed.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, loggers: Sequence[str] = ()) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.calls = [LOGGERS[name](folder) for name in loggers]

    def add(self, epoch: Epoch) -> None:
        """Note an epoch; one that was done before a stop replaces what was noted of it then."""
        self.rows.append(epoch._asdict())
        text = io.StringIO()
        table = csv.DictWriter(text, self.rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(self.rows)
        self.write_text(self.folder / "history.csv", text.getvalue())
        for call in self.calls:
            call(epoch)

    def finish(self) -> None:
        """Tell loggers that have a `finish` that the run has ended well."""
        for call in self.calls:
            getattr(call, "finish", lambda: None)()

    @staticmethod
    def write_text(path: Path, text: str) -> None:
        """Write a file whole or not at all, with its folder.

        Raises:
            OSError: it cannot be written; the message says which.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())
        except OSError as error:
            raise OSError(
                error.errno,
                f"{path} cannot be written ({error.strerror}): free some space or make it "
                "writable, then run again",
            ) from None

    @staticmethod
    def clear(folder: Path, *, keep: str = "") -> None:
        """Remove what is in the folder of a run, if it is there, but for one file."""
        for path in folder.iterdir() if folder.exists() else ():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != keep:
                path.unlink()


def check_loggers(names: Sequence[str]) -> None:
    """Refuse names that are not in `LOGGERS`.

    Raises:
        ValueError: one is unknown.
    """
    for name in names:
        if name not in LOGGERS:
            raise ValueError(unknown_name("logger", name, LOGGERS))


def _tensorboard(folder: Path) -> Callable[[Epoch], None]:
    """Return events in `folder/tensorboard`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing_extra("--tensorboard", "tensorboard", "tensorboard") from None
    # Events of an earlier part of the run would be there twice.
    Logs.clear(folder / "tensorboard")
    writer: Any = SummaryWriter(folder / "tensorboard")

    def log(epoch: Epoch) -> None:
        for name, value in epoch._asdict().items():
            if value is not None and name != "number":
                writer.add_scalar(name, value, epoch.number)
        writer.flush()

    return log


def _of_lightning(
    package: str, kind: str, options: Callable[[Path], dict[str, Any]]
) -> Callable[[Path], Any]:
    """Return a logger of Lightning, which Fabric takes too, under the name of the run's folder."""

    def make(folder: Path) -> Callable[[Epoch], None]:
        try:
            loggers = import_module("pytorch_lightning.loggers")
            logger: Any = getattr(loggers, kind)(**options(folder))
            logger.experiment  # noqa: B018  imports the package and starts the run
        except ImportError:
            packages = f"{package} and pytorch-lightning"
            raise missing_extra(f"--logger {package}", packages, package) from None
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"--logger {package} cannot start: {reason}") from error

        def log(epoch: Epoch) -> None:
            numbers = {k: v for k, v in epoch._asdict().items() if v is not None and k != "number"}
            logger.log_metrics(numbers, step=epoch.number)
            logger.save()

        log.finish = lambda: logger.finalize("success")  # type: ignore[attr-defined]
        return log

    return make


def _of_mlflow(folder: Path) -> dict[str, Any]:
    # Lightning's own default is a folder ./mlruns, which MLflow 3 refuses.
    place = import_module("mlflow").get_tracking_uri()
    return {"experiment_name": "fixpoint", "run_name": folder.name, "tracking_uri": place}


def _of_wandb(folder: Path) -> dict[str, Any]:
    return {"project": "fixpoint", "name": folder.name, "save_dir": str(folder)}


LOGGERS: dict[str, Callable[[Path], Callable[[Epoch], None]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _of_lightning("mlflow", "MLFlowLogger", _of_mlflow),
    "wandb": _of_lightning("wandb", "WandbLogger", _of_wandb),
}
"""Loggers by the name that --logger takes; a plugin may add others.

Each is called with the folder of a run and returns what is called with each `Epoch`, those from
before a stop included: `LOGGERS["mine"] = lambda folder: lambda epoch: print(epoch.number)`; its
attribute `finish`, if it has one, is called at the end.
"""
