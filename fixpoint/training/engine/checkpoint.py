"""Checkpoints: written whole or not at all, so that a killed training can be resumed."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from math import isclose
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lightning_fabric import Fabric
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

_FOREIGN = (SafetensorError, pickle.PickleError)

WEIGHTS = "model.safetensors"
"""File of the weights in the folder of an epoch."""


class Checkpoint:
    """The last epoch of a training, in a folder.

    `epoch-0007/` has the weights, `model.safetensors`, and `training.pt` with what else the next
    epoch depends on: optimizer, schedule, random generators of each process, history. A checkpoint
    is written under a temporary name, put on disk, then renamed, so one with its proper name is
    whole; the one before it is removed only then. `best.safetensors` has the weights of the best
    validation score.

    Args:
        folder: made if need be.
        source: of what recipe and data the training is; a checkpoint of another one is refused.
            Numbers may differ by rounding.
    """

    def __init__(self, folder: Path, source: Mapping[str, str | float] | None = None) -> None:
        self.folder = Path(folder)
        self.source = dict(source or {})

    @property
    def epochs(self) -> list[Path]:
        """The checkpoints that are there, in order."""
        whole = [path for path in self.folder.glob("epoch-*") if path.suffix != ".tmp"]
        return sorted(whole, key=lambda path: int(path.name.removeprefix("epoch-")))

    def load(self, fabric: Fabric, model: nn.Module, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Put model, state and random generators as the last checkpoint has them.

        Returns:
            The history that was saved with it; empty if there is no checkpoint.

        Raises:
            ValueError: the checkpoint cannot be read, or belongs to other settings.
        """
        if not self.epochs:
            return []
        path = self.epochs[-1]
        try:
            weights = load((path / WEIGHTS).read_bytes())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a file that torch did not write
                saved = torch.load(path / "training.pt", map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, *_FOREIGN):
            raise _unusable(path, "a file in it is missing, truncated or damaged") from None
        for name, value in saved.get("source", {}).items():
            if self._differs(name, value):
                raise _unusable(path, f"it is of another training: {name} differs")
        try:
            model.load_state_dict(weights)
            state["optimizer"].load_state_dict(saved["optimizer"])
            state["schedule"].load_state_dict(saved["schedule"])
            state["order"].set_state(saved["order"])
            fabric.strategy.precision.load_state_dict(saved["precision"])
            _set_random_state(fabric, saved["random"][fabric.global_rank])
        except (RuntimeError, LookupError, ValueError, TypeError):
            raise _unusable(path, "it is of a model or training with other settings") from None
        history: list[dict[str, Any]] = saved["history"]
        return history

    def _differs(self, key: str, saved: str | float) -> bool:
        own = self.source.get(key, saved)
        if isinstance(saved, float) and isinstance(own, float):
            return not isclose(own, saved, rel_tol=1e-4)
        return own != saved

    def save(
        self,
        fabric: Fabric,
        model: nn.Module,
        state: dict[str, Any],
        history: list[dict[str, Any]],
        *,
        best: bool,
    ) -> None:
        """Save after the last epoch of `history`; every process calls this, the first one writes.

        Raises:
            OSError: the disk is full or the folder cannot be written; the last checkpoint is kept.
        """
        random: list[Any] = [_random_state(fabric)]
        if fabric.world_size > 1:
            random *= fabric.world_size
            torch.distributed.all_gather_object(random, random[0])
        failure = None
        if fabric.is_global_zero:
            weights = {
                name: value.detach().cpu().contiguous().clone()
                for name, value in model.state_dict().items()
            }
            training = {
                "optimizer": state["optimizer"].state_dict(),
                "schedule": state["schedule"].state_dict(),
                "order": state["order"].get_state(),
                "precision": fabric.strategy.precision.state_dict(),
                "random": random,
                "source": self.source,
                "history": history,
            }
            try:
                self._write(len(history), save(weights), _dumped(training), best)
            except OSError as error:
                failure = (error.errno, error.strerror)
        failure = fabric.broadcast(failure)
        if failure is not None:
            kept = f"{self.epochs[-1]} is kept" if self.epochs else "there is none before it"
            raise OSError(
                failure[0],
                f"the checkpoint of epoch {len(history)} cannot be written to {self.folder} "
                f"({failure[1]}); {kept}: free some space or make it writable, then run again",
            )

    def _write(self, number: int, weights: bytes, training: bytes, best: bool) -> None:
        old = self.epochs
        target = self.folder / f"epoch-{number:04d}"
        temporary = target.with_suffix(".tmp")
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            write_bytes(temporary / WEIGHTS, weights)
            write_bytes(temporary / "training.pt", training)
            if best:
                replace_file(self.folder / "best.safetensors", weights)
            os.replace(temporary, target)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync(self.folder)
        for path in old:
            shutil.rmtree(path, ignore_errors=True)


def _unusable(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"the checkpoint {path} cannot be used ({reason}): remove it, or start again in another "
        "folder"
    )


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, on disk before this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: it cannot be written; what was there before is kept.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_bytes(temporary, content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    """Put the names in a folder on disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _random_state(fabric: Fabric) -> Tensor:
    """Return the state of torch's generators in this process as one tensor of bytes."""
    parts = [torch.get_rng_state()]
    if fabric.device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(fabric.device))
    return torch.cat(parts)


def _set_random_state(fabric: Fabric, state: Tensor) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].contiguous())
    if fabric.device.type == "cuda":
        torch.cuda.set_rng_state(state[size:].contiguous(), fabric.device)
