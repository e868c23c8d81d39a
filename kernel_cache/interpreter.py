"""Which builds of Python are refused: those that run without a global interpreter lock.

Kernels release that lock by themselves, which is where the cores come from. What lies between them,
in Python, counts on it: a change of two fields that others read is one step. Without the lock it
would not be, and blocks would be wrong in ways no test here looks for. So it is said once, at the
start. Costs a microsecond.
"""

from __future__ import annotations

import sys

__all__ = ["ADVICE", "refusal"]

ADVICE = "run it with an ordinary build, python3.13 instead of python3.13t"


def refusal() -> str:
    """Why this interpreter is not to be used, or an empty string."""
    enabled = getattr(sys, "_is_gil_enabled", None)  # since Python 3.13
    if enabled is None or enabled():
        return ""
    version = ".".join(map(str, sys.version_info[:3]))
    return f"Python {version} runs without a global interpreter lock, which is not supported"
