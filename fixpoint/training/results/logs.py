"""What a run leaves in its folder beside the checkpoints: recipe, history, TensorBoard events."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fixpoint._messages import missing_extra
from fixpoint.training.engine.checkpoint import replace_file

if TYPE_CHECKING:
    from fixpoint.training.engine.fit import Epoch


class Logs:
    """`history.csv`, one line an epoch, and event files for TensorBoard if asked for.

    Args:
        folder: of the run; made if need be.
        tensorboard: write events to `folder/tensorboard`.

    Raises:
        ValueError: TensorBoard is asked for and not installed.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.writer: Any = _writer(folder / "tensorboard") if tensorboard else None

    def add(self, epoch: Epoch) -> None:
        """Note an epoch; one that was done before a stop replaces what was noted of it then."""
        self.rows.append(epoch._asdict())
        text = io.StringIO()
        table = csv.DictWriter(text, self.rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(self.rows)
        self.write_text(self.folder / "history.csv", text.getvalue())
        if self.writer:
            for name, value in self.rows[-1].items():
                if value is not None and name != "number":
                    self.writer.add_scalar(name, value, epoch.number)
            self.writer.flush()

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


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing_extra("--tensorboard", "tensorboard", "tensorboard") from None
    # Events of an earlier part of the run would be there twice.
    Logs.clear(folder)
    return SummaryWriter(folder)
