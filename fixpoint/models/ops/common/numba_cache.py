"""Compilation by numba with a cache on disk that sees every edit of this package.

numba looks for changes only in the file of a function, not in the functions it calls: the folder
of the cache is therefore named by a hash of all sources that a kernel may be made of.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba import config as _config
from numba import njit

config: Any = _config

PACKAGE = Path(__file__).parents[3]
SOURCES = (PACKAGE / "models" / "ops", PACKAGE / "solvers")
"""Folders of the kernels and of the solvers, whose constants they take."""
# Loops vectorise where sums may be reordered and division does not raise; NaN and infinity keep
# their meaning.
# Without numba's own memory no reference is counted: each row taken out of an array would otherwise
# cost two atomic operations, together up to a quarter of a kernel.
FAST: Any = {
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "_nrt": False,
}


def cached_njit(
    sources: tuple[Path, ...] = SOURCES, *, allocates: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Return `numba.njit` with the options `FAST`, cached until a file below `sources` changes.

    allocates: whether the function itself makes arrays, which counts references to all of them.
    Any other one must not return an array, which its caller may count.
    """

    def compile_at_first_call(function: Callable[..., Any]) -> Any:
        with _cache_folder(sources):
            return njit(cache=True, **(FAST | {"_nrt": allocates} | options))(function)

    return compile_at_first_call


@functools.cache
def source_hash(sources: tuple[Path, ...]) -> str:
    """Hash the contents of all Python files below some folders but those of Triton."""
    digest = hashlib.sha256()
    for folder in sources:
        for path in sorted(folder.rglob("*.py")):
            if not path.name.startswith("triton"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _cache_folder(sources: tuple[Path, ...]) -> Iterator[None]:
    """Set numba's cache folder, below the user's own where one is set."""
    given = config.CACHE_DIR
    base = Path(given) if given else sources[0] / "__pycache__"
    config.CACHE_DIR = str(base / f"numba-{source_hash(sources)}")
    try:
        yield
    finally:
        config.CACHE_DIR = given
