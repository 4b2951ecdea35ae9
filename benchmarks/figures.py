"""Parts common to the benchmarks: the device, its name, and their figures as lines of JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from processor import processor


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--device` and `--json`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="append the figures to this file, one a line")


class Figures:
    """Appends one JSON object a call to a file, or none where no file was asked for."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def add(self, **figures: object) -> None:
        """Written at once, so that a benchmark that is stopped leaves what it has."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")


def device_name(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{processor()}, torch {torch.__version__}"


def synchronize(device: str) -> None:
    """Wait until the device has done all that was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()
