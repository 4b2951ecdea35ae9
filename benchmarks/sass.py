"""Registers, stack and cycles of a compiled Triton kernel, from its machine code, without a GPU.

The model of cycles: warps of one scheduler of four issue in turn, one instruction a cycle, each
after the stall that the compiler wrote into it, and after the loads and others that it waits for.
These take the latencies below, of an H100 by common measurements; a load from memory is taken to
hit the second cache level. The pipe to shared memory serves four schedulers, 128 bytes a cycle:
a vector of 16 bytes takes 4. Barriers end 20 cycles after the last warp. A branch forward inside
the loop, around what is rare, is taken. Clocks, bank conflicts and a second program
on the multiprocessor are left out: good for comparing two kernels, not for seconds.
"""

import collections
import re
import subprocess
import tempfile
from typing import NamedTuple

import triton

EXCHANGE = ["LDS", "STS", "SHFL", "LDSM", "STSM", "LDG", "STG", "LDL", "STL", "LDGSTS"]
LATENCY = {"LDS": 30, "LDSM": 33, "STS": 30, "STSM": 30, "SHFL": 25, "MUFU": 25, "LDG": 300}
LATENCY |= {"LDL": 40, "STG": 30, "STL": 30, "LDGSTS": 300, "S2R": 25, "LDC": 30, "HMMA": 33}
LATENCY |= dict.fromkeys(("DFMA", "DADD", "DMUL", "DSETP"), 16)
BARRIER, OTHER, SCHEDULERS = 20, 20, 4
LINE = re.compile(
    r"/\*([0-9a-f]{4,5})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/\s*\n\s+/\* 0x([0-9a-f]{16}) \*/"
)


class Instruction(NamedTuple):
    """One line of machine code with its control bits.

    sets, frees: numbers of the scoreboards that it releases with its result, and with its
    operands; 7 for none. waits: bits of those that it waits for.
    """

    place: int
    name: str
    target: int | None
    stall: int
    sets: int
    frees: int
    waits: int

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]


class Resources(NamedTuple):
    """What a thread and a block take; stack: bytes of registers that did not fit."""

    registers: int
    stack: int
    shared: int


def disassemble(binary: bytes) -> tuple[Resources, list[Instruction]]:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage, text = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage.stdout + usage.stderr)
    assert found is not None
    return Resources(*map(int, found.groups())), parse(text.stdout)


def parse(text: str) -> list[Instruction]:
    return [_instruction(*parts) for parts in LINE.findall(text)]


def _instruction(place: str, words: str, bits: str) -> Instruction:
    control = int(bits, 16)
    name = next(word for word in words.split() if not word.startswith("@"))
    target = re.search(r"0x([0-9a-f]+)", words) if name.startswith("BRA") else None
    return Instruction(
        int(place, 16),
        name,
        int(target[1], 16) if target else None,
        control >> 41 & 15,
        control >> 46 & 7,
        control >> 49 & 7,
        control >> 52 & 63,
    )


def inner_loop(code: list[Instruction]) -> list[Instruction]:
    """The instructions of one turn of the shortest loop with many products."""
    index = {x.place: i for i, x in enumerate(code)}
    loops = [
        (index[x.target], i)
        for i, x in enumerate(code)
        if x.target is not None and index.get(x.target, len(code)) < i
    ]
    # Behind a kernel stand its steps for threads of a warp that are not together, as never here.
    apart = [i for i, x in enumerate(code) if x.kind == "ENDCOLLECTIVE"]
    loops = [loop for loop in loops if not any(loop[0] <= i <= loop[1] for i in apart)]
    products = {
        loop: sum(x.kind in ("FFMA", "HMMA", "HGMMA") for x in code[loop[0] : loop[1] + 1])
        for loop in loops
    }
    most = max(products.values())
    first, last = min(
        (loop for loop in loops if products[loop] >= 0.25 * most),
        key=lambda loop: loop[1] - loop[0],
    )
    turn, i = [], first
    while i <= last:
        turn.append(code[i])
        target = code[i].target
        skipped = i < last and target is not None and i < index.get(target, -1) <= last
        i = index[target] if skipped and target is not None else i + 1
    return turn


def cycles(turn: list[Instruction], warps: int, turns: int = 6) -> int:
    """Of one turn of a loop, by the model above, once the turns are all alike."""
    busy = min(SCHEDULERS, warps)
    running = [_Warp() for _ in range(max(1, warps // SCHEDULERS))]
    free: dict[str, int] = collections.Counter()
    now, ends = 0, [0] * (turns + 1)
    while any(w.turn < turns for w in running):
        ready = [w for w in running if w.turn < turns and not w.at_barrier]
        if not ready:
            for w in running:
                w.at_barrier, w.ready = False, now + BARRIER
            continue
        at, warp = min(((w.earliest(turn, now, free), w) for w in ready), key=lambda pair: pair[0])
        x = turn[warp.next]
        warp.issue(x, at, _done(x, at, free, busy))
        now = at + 1
        warp.next += 1
        if warp.next == len(turn):
            warp.next, warp.turn = 0, warp.turn + 1
            ends[warp.turn] = at
    return ends[turns] - ends[turns - 1]


class _Warp:
    def __init__(self) -> None:
        self.next = self.turn = self.ready = 0
        self.at_barrier = False
        self.scoreboards = [0] * 8

    def earliest(self, turn: list[Instruction], now: int, free: dict[str, int]) -> int:
        x = turn[self.next]
        waits = [self.scoreboards[b] for b in range(6) if x.waits >> b & 1]
        return max(self.ready, now, free[_pipe(x)] if _pipe(x) != "exchange" else 0, *waits, 0)

    def issue(self, x: Instruction, at: int, done: int) -> None:
        self.scoreboards[x.sets] = done
        is_store = x.kind in ("STS", "STG", "STL")
        read = done - LATENCY.get(x.kind, OTHER)  # when its turn in the pipe ends
        self.scoreboards[x.frees] = (at + done) // 2 if is_store else max(at + 8, read)
        self.ready = at + max(1, x.stall)
        self.at_barrier = x.kind == "BAR"


def _pipe(x: Instruction) -> str:
    if x.kind in EXCHANGE:
        return "exchange"
    return {"MUFU": "special", "D": "double"}.get(x.kind if x.kind == "MUFU" else x.kind[0], "none")


def _done(x: Instruction, at: int, free: dict[str, int], busy: int) -> int:
    """When the result is there, in a pipe that is occupied for so long."""
    pipe, latency = _pipe(x), LATENCY.get(x.kind, OTHER)
    if pipe == "none":
        return at + latency
    width = 4 if ".128" in x.name else 2 if ".64" in x.name else 1
    use = {"exchange": width * busy, "special": 8, "double": 2}[pipe]
    start = max(at, free[pipe])
    free[pipe] = start + use
    return start + (use if pipe == "exchange" else 0) + latency
