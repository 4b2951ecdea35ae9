"""Triton kernels compiled for a GPU that this machine need not have: `benchmarks` has the tools."""

import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import sass  # noqa: E402, F401
from kernel_resources import SHARED, TYPES, Variant, compile_for, variants  # noqa: E402, F401
