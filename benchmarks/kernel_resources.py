"""Registers, stack, shared memory and cycles of the Triton kernels: no GPU is needed.

    python benchmarks/kernel_resources.py [--capability 80 90] > table.md

Prints the table of docs/kernels.md. Cycles are those of the model in `sass`, for one step of a
recurrence and one update of an equilibrium.
"""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import sass
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fixpoint.models.ops.common import triton_recurrence as recurrence
from fixpoint.models.ops.equilibrium import triton_kernels as equilibrium

SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a block may have, by compute capability."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = {"leaky": 0, "FastGRNN": 1, "UGRNN": 2}


class Variant(NamedTuple):
    """A kernel as the dispatcher launches it.

    name: of `KINDS`, or "equilibrium". memory: of Anderson mixing.
    """

    name: str
    pass_: str
    n: int
    dtype: str = "fp32"
    memory: int = 0
    activation: str = "tanh"
    capability: int = 90

    @property
    def config(self) -> Any:
        if self.name == "equilibrium":
            return equilibrium.launch_config(self.n)
        products = max(1, KINDS[self.name])
        shared = SHARED[self.capability]
        return recurrence.launch_config(self.n, TYPES[self.dtype], products, shared=shared)

    def compile(self) -> Any:
        of = _equilibrium if self.name == "equilibrium" else _recurrence
        kernel, types, constants = of(self)
        return compile_for(
            kernel, types, constants, self.capability, aligned=True, options=self.config.options
        )


def variants(capabilities: list[int]) -> Iterator[Variant]:
    """Those of the table."""
    for capability in capabilities:
        for pass_ in ("forward", "backward"):
            for name in KINDS:
                for n in (32, 64, 80, 128):
                    yield Variant(name, pass_, n, capability=capability)
                yield Variant(name, pass_, 256, capability=capability)
                for n in (128, 256):
                    yield Variant(name, pass_, n, "bf16", capability=capability)
            for n in (32, 64, 80, 128):
                yield Variant("equilibrium", pass_, n, capability=capability)
            for n in (80, 128):
                yield Variant("equilibrium", pass_, n, memory=5, capability=capability)


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


def _recurrence(v: Variant) -> tuple[Any, dict[str, str], dict[str, Any]]:
    kernel = getattr(recurrence, f"_{v.pass_}")
    config, kind = v.config, KINDS[v.name]
    pointers = ["U0", "U1", "V0", "V1", "bias", "h", "S", "O", "kept0", "kept1", "G", "g"]
    types = dict.fromkeys([*pointers, "D0", "D1"], f"*{v.dtype}")
    types |= dict.fromkeys(("w0", "w1", "dw", "dbias"), "*fp32")
    constants = {"n": v.n, "KIND": kind, "ACTIVATION": v.activation, "HAS_BIAS": kind > 0}
    constants |= {"HAS_S": True, "HAS_O": False, "HAS_G": True, "KEEP": True, "K": 1, "every": 1}
    constants |= {
        "SIZE": config.size,
        "ROWS": 1 if v.name == "equilibrium" else config.rows,
        "TILE": config.tile,
    }
    return kernel, types, constants | {"LANES": config.lanes, "PARTS": config.parts}


def _equilibrium(v: Variant) -> tuple[Any, dict[str, str], dict[str, Any]]:
    kernel, config = getattr(equilibrium, f"_{v.pass_}"), v.config
    names = "X S C residual steps G U V g D adjoint"
    types = dict.fromkeys(names.split(), "*fp32") | dict.fromkeys(("rtol", "atol"), "fp32")
    types |= {"iterations": "*i64", "result": "*i8", "ended": "*i8"}
    constants = {"n": v.n, "ACTIVATION": v.activation, "MEMORY": v.memory, "KEEP": True}
    constants |= {"UNDAMPED": v.memory == 0}
    return kernel, types, constants | {"SIZE": config.size}


def blocks_at_a_time(registers: int, warps: int, shared: int, capability: int) -> int:
    """Programs that a multiprocessor runs at once."""
    of_a_warp = -(-registers * 32 // 256) * 256
    by_shared = (SHARED[capability] + 1024) // (shared + 1024)
    return min(65536 // (of_a_warp * warps), 64 // warps, by_shared, 32)


def row(v: Variant) -> list[Any]:
    kernel, config = v.compile(), v.config
    found, code = sass.disassemble(kernel.asm["cubin"])
    shared = kernel.metadata.shared
    return [
        f"{v.name}{f', memory {v.memory}' if v.memory else ''}",
        v.pass_,
        v.n,
        v.dtype,
        1 if v.name == "equilibrium" else config.rows,
        config.warps,
        v.capability,
        found.registers,
        found.stack,
        shared,
        blocks_at_a_time(found.registers, config.warps, shared, v.capability),
        sass.cycles(sass.inner_loop(code), config.warps) if v.capability == 90 else "",
    ]


HEADER = [
    *("kernel", "pass", "n", "type", "rows", "warps", "capability", "registers"),
    *("stack, bytes", "shared, bytes", "programs a multiprocessor", "cycles a step"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="*", default=[80, 90])
    print(f"| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|")
    for variant in variants(parser.parse_args().capability):
        print(f"| {' | '.join(map(str, row(variant)))} |", flush=True)


if __name__ == "__main__":
    main()
