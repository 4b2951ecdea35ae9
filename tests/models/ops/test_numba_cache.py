"""The compiled code of a kernel is not used again after an edit of any file it may be made of."""

import os
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="needs numba")

from fixpoint.models.ops.common import numba_cache
from fixpoint.models.ops.common.numba_cache import PACKAGE, SOURCES, source_hash

KERNEL = """
from pathlib import Path
from numba_cache import cached_njit
from helper import twice
@cached_njit((Path(__file__).parent,))
def kernel(x):
    return twice(x)
print(kernel(3), sum(kernel.stats.cache_hits.values()))
"""
HELPER = """
from pathlib import Path
from numba_cache import cached_njit
@cached_njit((Path(__file__).parent,))
def twice(x):
    return {factor} * x
"""


def test_an_edit_of_a_helper_recompiles_its_callers(tmp_path, monkeypatch):
    """Of a copy of the module, which needs numba alone: torch takes seconds to import.

    Python's own cache of bytecode is off: it keeps the old helper after an edit of equal size
    within one second, as all edits here are made to be.
    """
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    shutil.copy(numba_cache.__file__, tmp_path)
    (tmp_path / "kernel.py").write_text(KERNEL)
    seen = []
    for factor in (2, 2, 5):
        helper = tmp_path / "helper.py"
        helper.write_text(HELPER.format(factor=factor))
        os.utime(helper, (0, 0))
        command = [sys.executable, "-B", tmp_path / "kernel.py"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        seen.append(result.stdout.split())
    assert seen == [["6", "0"], ["6", "1"], ["15", "0"]]


def test_the_hash_depends_on_every_file(tmp_path):
    def hash_of(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        source_hash.cache_clear()
        return source_hash((tmp_path,))

    first = hash_of(a="1", b="2")
    assert hash_of(b="3") != first
    assert hash_of(b="2") == first
    assert hash_of(triton_b="2") == first  # of which numba compiles nothing


def test_every_module_that_kernels_take_constants_from_is_a_source():
    for path in (PACKAGE / "models" / "ops").rglob("numba*.py"):
        for name in re.findall(r"^from (fixpoint\.solv\S+) import", path.read_text(), re.MULTILINE):
            module = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
            assert any(module.is_relative_to(folder) for folder in SOURCES), name
