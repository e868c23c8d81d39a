"""What the generated pieces of the core's kernels do, in Python: for kernels run as `.py_func`."""

import ctypes

import numpy as np

from mooncake_store.core.kernels.lines import LINE


def column(words, place, kind):
    """View the column bound at `place`, as `_kernels_columns.column` does."""
    address, count = int(words[place]), int(words[place + 1])
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind)


def ask_for(table, at):
    """Only look whether there is such an entry."""
    table[at]


def first_equal(table, at, value, shift):
    """Compare the eight entries from `at` on, as `_kernels_lines.first_equal` does."""
    entries = table[at : at + LINE].view(np.uint64) >> np.uint64(shift)
    places = np.flatnonzero(entries == np.int64(value).view(np.uint64))
    return int(places[0]) if len(places) else LINE
