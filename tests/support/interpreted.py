"""Triton kernels run by its interpreter, in a process of their own.

The decorator of a kernel reads TRITON_INTERPRET when Triton is imported.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def assert_passes_interpreted(path: Path) -> None:
    """Run a file of tests with TRITON_INTERPRET=1: all pass, ten or more, and none is skipped."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", path],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d\d passed", result.stdout)
    assert "skipped" not in result.stdout
