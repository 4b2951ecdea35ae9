"""The processor and the widths of its vectors, as each benchmark prints them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def processor() -> str:
    """Such as "Intel(R) Xeon(R) Processor, 2 cores, torch AVX512, numba rocketlake 512 bits"."""
    parts = [_name(), f"{os.cpu_count()} cores"]
    parts.append(f"torch {torch.backends.cpu.get_cpu_capability()}")
    try:
        import llvmlite.binding as llvm
    except ModuleNotFoundError:
        return ", ".join([*parts, "no numba"])
    features = llvm.get_host_cpu_features()
    wide, half = features.get("avx512f", False), features.get("avx", False)
    width = 512 if wide else 256 if half else 128
    return ", ".join([*parts, f"numba {llvm.get_host_cpu_name()} {width} bits"])


def _name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    print(processor())
