"""The compiled code of a kernel is not used again after an edit of any file it may be made of."""

import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="needs numba")

from fixpoint.models.ops.common.numba_cache import source_hash

KERNEL = """
from pathlib import Path
from fixpoint.models.ops.common.numba_cache import cached_njit
from helper import twice
@cached_njit(Path(__file__).parent)
def kernel(x):
    return twice(x)
print(kernel(3), sum(kernel.stats.cache_hits.values()))
"""
HELPER = """
from pathlib import Path
from fixpoint.models.ops.common.numba_cache import cached_njit
@cached_njit(Path(__file__).parent)
def twice(x):
    return {factor} * x
"""


def test_an_edit_of_a_helper_recompiles_its_callers(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    (tmp_path / "kernel.py").write_text(KERNEL)
    seen = []
    for factor in (2, 2, 5):
        (tmp_path / "helper.py").write_text(HELPER.format(factor=factor))
        command = [sys.executable, tmp_path / "kernel.py"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        seen.append(result.stdout.split())
    assert seen == [["6", "0"], ["6", "1"], ["15", "0"]]


def test_the_hash_depends_on_every_file(tmp_path):
    def hash_of(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        source_hash.cache_clear()
        return source_hash(tmp_path)

    first = hash_of(a="1", b="2")
    assert hash_of(b="3") != first
    assert hash_of(b="2") == first
