"""Binding the calling thread to a NUMA node, as the original's `bind_to_numa_node` does."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

__all__ = ["bind_to_numa_node"]

_MPOL_PREFERRED = 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_NODES_MAX = 1024


def bind_to_numa_node(node: int) -> None:
    """Run this thread on the processors of a node and prefer its memory.

    Does nothing for a node this machine does not have, and where the system does not let it.
    """
    listed = Path(f"/sys/devices/system/node/node{node}/cpulist")
    if node < 0 or node >= _NODES_MAX or not listed.exists():
        return
    allowed = _processors(listed.read_text(encoding="ascii")) & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None:
        words = (ctypes.c_ulong * (_NODES_MAX // 64))()
        words[node // 64] = 1 << (node % 64)
        # A refusal (no such call in a sandbox) leaves memory where the kernel puts it.
        ctypes.CDLL(None).syscall(
            ctypes.c_long(number), ctypes.c_int(_MPOL_PREFERRED), words, ctypes.c_ulong(_NODES_MAX)
        )


def _processors(text: str) -> set[int]:
    """The numbers in a list such as "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
