"""Peak memory of a piece of work."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Peak memory in MiB since `start`, above what was held then.

    On a CUDA device the allocator's peak; on a Linux CPU the resident set of the process; None
    elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: float | None = None

    def start(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device) / 2**20
        elif _STATUS.exists():
            _return_freed_memory()
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
            self.before = _resident("VmRSS")

    def peak(self) -> float | None:
        if self.before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20 - self.before
        return _resident("VmHWM") - self.before


def _resident(field: str) -> float:
    match = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    return int(match.group(1)) / 1024 if match else float("nan")


def _return_freed_memory() -> None:
    """Give the C library's free lists back, so that an earlier run does not hide this one's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
