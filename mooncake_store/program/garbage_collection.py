"""Garbage collection of a serving program: none while it starts, seldom afterwards.

    hold_garbage_collection()        # first of all, before the heavy imports
    ...                              # imports, kernels, tables
    settle_garbage_collection()      # when it is ready

Importing numba and loading kernels makes some 500,000 objects that live as long as the process.
Collections meanwhile find nothing and take an eighth of a warm start. Nothing else is decided
here; a library never calls these, because garbage collection belongs to the program.
"""

from __future__ import annotations

import gc

__all__ = ["hold_garbage_collection", "settle_garbage_collection"]


def hold_garbage_collection() -> None:
    """Collect nothing until `settle_garbage_collection`."""
    gc.disable()


def settle_garbage_collection() -> None:
    """Collect again, and keep collections short: they would stop every client of this process.

    What exists now (modules, kernels, tables) lives as long as the process, so it is taken out of
    all later collections. Requests make no reference cycles, only failures do, so collecting
    seldom leaks nothing that matters. Not collected first: that takes 50 ms of a start, and what
    little garbage there is may stay.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.enable()
