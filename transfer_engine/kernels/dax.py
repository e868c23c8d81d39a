"""Write-back of processor caches to memory that keeps its content, line by line.

Stores to a DAX device reach it when their cache lines are written back; no system call does that
(`/dev/dax*` has no fsync). The processor has instructions for it: CLWB or CLFLUSHOPT and a store
fence where x86-64 offers them, CLFLUSH on the rest, DC CVAC and a barrier on aarch64. They act on
a line wherever it is cached, so one process can flush what another has written.

Addresses are plain integers that callers have checked.
"""

import functools
import platform
from pathlib import Path

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from kernel_cache import njit

binding.initialize_native_asmparser()  # numba itself never compiles assembly

_LINE = 64  # the line of x86-64; no smaller than what aarch64 has to be walked in
CLFLUSH, CLFLUSHOPT, CLWB = 0, 1, 2

_ARM = platform.machine() == "aarch64"
_TEXTS = ["dc cvac, $0"] * 3 if _ARM else ["clflush ($0)", "clflushopt ($0)", "clwb ($0)"]
_FENCE = "dsb sy" if _ARM else "sfence"


def _assembly(text, operands):
    """Return a numba code generator that emits one instruction."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * operands)
        constraints = ",".join(["r"] * operands + ["~{memory}"])
        builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), arguments)
        return context.get_dummy_value()

    return generate


@intrinsic
def _clflush(typing, address):
    return types.none(types.int64), _assembly(_TEXTS[CLFLUSH], 1)


@intrinsic
def _clflushopt(typing, address):
    return types.none(types.int64), _assembly(_TEXTS[CLFLUSHOPT], 1)


@intrinsic
def _clwb(typing, address):
    return types.none(types.int64), _assembly(_TEXTS[CLWB], 1)


@intrinsic
def _fence(typing):
    return types.none(), _assembly(_FENCE, 0)


@njit(cache=True, nogil=True)
def write_back(address, length, instruction):
    """Write the cache lines of [address, address + length) back; return how many. O(lines).

    instruction: CLFLUSH, CLFLUSHOPT or CLWB, one that `instruction` says the processor has.
    """
    line = np.int64(address) // _LINE * _LINE
    count = 0
    while line < address + length:
        if instruction == CLWB:
            _clwb(line)
        elif instruction == CLFLUSHOPT:
            _clflushopt(line)
        else:
            _clflush(line)
        line += _LINE
        count += 1
    _fence()
    return count


@functools.cache
def instruction() -> int:
    """Return the cheapest instruction that this processor has."""
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    if "clwb" in flags:
        return CLWB
    return CLFLUSHOPT if "clflushopt" in flags else CLFLUSH


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    line = np.zeros(_LINE, dtype=np.uint8)
    write_back(int(line.ctypes.data), _LINE, instruction())
