"""Triton kernels compiled for a GPU that this machine need not have."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compile_for(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    *,
    aligned: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:
    """The kernel for this compute capability.

    Args:
        types: of its arguments, int32 where none is given.
        constants: values of its constexpr arguments; others are left out.
        aligned: whether pointers are multiples of 16 bytes.
    """
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    types = types | dict.fromkeys(constants, "constexpr")
    signature = {x: types.get(x, "i32") for x in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, x in enumerate(kernel.arg_names)
        if aligned and signature[x].startswith("*")
    }
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
