"""Operations on tuples of arrays for kernels compiled by numba, written out entry by entry.

numba types each entry of a tuple by itself, so that a loop over them must be unrolled; LLVM then
sees single arrays, as if each had a name.
"""

from __future__ import annotations

import re
from typing import Any

from numba.extending import overload

from fixpoint.models.ops.common.numba_blocks import as_vector
from fixpoint.models.ops.common.numba_pointwise import INLINED
from fixpoint.models.ops.common.pointwise import zero_like


def _unrolled(parameters: str, entry: str, body: str = "return ({entries},)") -> Any:
    """Return a function for kernels, from one entry of it, of number i of the first parameter.

    body: of the function from the `entries` between commas, or from the lines of `statements`.
    """

    def implementation(count: int) -> Any:
        each = [re.sub(r"\bi\b", str(i), entry) for i in range(count)]
        lines = body.format(entries=", ".join(each), statements="; ".join(each))
        scope: dict[str, Any] = {"as_vector": as_vector, "zero_like": zero_like}
        exec(f"def function({parameters}):\n    {lines if count else 'return ()'}", scope)
        return scope["function"]

    first = parameters.partition(",")[0]
    function = eval(f"lambda {parameters}: None")
    rule = eval(f"lambda {parameters}: make(len({first}))", {"make": implementation})
    # Who returns arrays counts references to them, as its caller does.
    options = INLINED | {"_nrt": "as_vector" in entry}
    overload(function, jit_options=options)(rule)
    return function


entries = _unrolled("v, j", "v[i][j]")
put_entries = _unrolled("v, j, values", "v[i][j] = values[i]", "{statements}")
add_entries = _unrolled("v, j, values", "v[i][j] += values[i]", "{statements}")
plus = _unrolled("a, b", "a[i] + b[i]")
zeros_of = _unrolled("v", "zero_like(v[i])")
put_sums = _unrolled("v, block, m, values", "v[i][block, m] = values[i]", "{statements}")
rows_of = _unrolled("v, lo, hi", "as_vector(v[i][lo:hi])")
"""Rows lo to hi of arrays (B, n)."""
rows_at = _unrolled("v, t, lo, hi", "as_vector(v[i][t, lo:hi])")
"""Rows lo to hi at t of arrays (T, B, n)."""
rows_at_or = _unrolled(
    "v, keep, t, lo, hi, other",
    "as_vector(v[i][t, lo:hi] if keep and len(v[i]) > 0 else other[i, : hi - lo])",
)
"""The same, or those of another array where an array is empty or its rows are not kept."""
rows_of_each = _unrolled("like, array, count", "as_vector(array[i, :count])")
"""The first rows of array[i], (.., rows, n), for each entry of a tuple like this."""
drives_at = _unrolled(
    "X, W, t, lo, hi, products",
    "as_vector(products[i, : hi - lo] if len(W[i]) > 0 else X[i][t, lo:hi])",
)
"""Drives of a step: X itself, or the products with W where there is one."""


def add_gradients(y, p, e):  # type: ignore[no-untyped-def]
    """Add e to y, and to the first entry all of p."""
    raise NotImplementedError


@overload(add_gradients, jit_options=INLINED)
def _add_gradients(y, p, e):  # type: ignore[no-untyped-def]
    products = "".join(f" + p[{i}]" for i in range(len(p)))
    others = "".join(f"y[{i}] + e[{i}], " for i in range(1, len(y)))
    return eval(f"lambda y, p, e: (y[0]{products} + e[0], {others})")
