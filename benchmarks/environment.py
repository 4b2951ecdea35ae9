"""Environment of a benchmark, without variables that slow it: import it before NumPy and torch.

OPENBLAS_CORETYPE gives OpenBLAS the kernels of another processor: then the products of NumPy and
SciPy, and with them all kernels compiled by numba, may run at half speed, and torch's do not.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)


def blas_kernel() -> str:
    """The kernels of OpenBLAS that SciPy, and so numba, takes on this processor."""
    import scipy.linalg

    folder = Path(scipy.__file__).parent.parent / "scipy.libs"
    for path in folder.glob("lib*openblas*"):
        library = ctypes.CDLL(str(path))
        for name in ("scipy_openblas_get_corename", "openblas_get_corename"):
            function = getattr(library, name, None)
            if function is not None:
                function.restype = ctypes.c_char_p
                return str(function().decode())
    return "of an unknown name"
