"""All Triton kernels run by Triton's interpreter, in one process of their own.

The decorator of a kernel reads TRITON_INTERPRET when Triton is imported.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")

TESTS = Path(__file__).parent
FILES = {
    TESTS / "models" / "ops" / "interpreted_recurrences.py": "triton",
    TESTS / "models" / "ops" / "interpreted_equilibrium.py": "numba",
    TESTS / "sequence" / "interpreted_scan.py": "triton",
}
"""Files of tests, and what each compares with or needs."""


def test_the_kernels_pass_interpreted():
    """Every test passes, and none is skipped."""
    assert set(FILES) == set(TESTS.rglob("interpreted_*.py"))
    paths = [path for path, needed in FILES.items() if importlib.util.find_spec(needed)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *paths],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d\d passed", result.stdout)
    assert "skipped" not in result.stdout
