"""Kernels of the tags that content has of its writers: told to gets; `cells.keep_tag` keeps them.

A column beside the rows, of which nothing is memory before a tag is kept, and nothing is looked at:
TAGS_USED says whether there is any. What it has for a row that is not readable means nothing.
Layouts are those of `records.py`, places in `context` those of `context.py`. O(n).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import KERNEL, OK, READABLE
from mooncake_store.core.context import (
    FOUND,
    INT32,
    INT64,
    ROWS,
    TABLE_A,
    TABLE_B,
    TAGS,
    TAGS_USED,
)
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.table import find
from mooncake_store.core.records import ROW


@njit(**KERNEL, inline="always")
def tag_in(context, rows, row):
    """The tag of the content of a row, 0 for none. O(1)."""
    if context[TAGS_USED] == 0 or rows[row].state != READABLE:
        return np.int64(0)
    return column(context, TAGS, INT64)[row]


@njit(**KERNEL)
def tell_tags(context, digests, answers, out):
    """out[i, 0] = the tag of the content that a get made just now has answered, 0 for none."""
    found = column(context, FOUND, INT32)
    rows = column(context, ROWS, ROW)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, rows, digests, found)
    for i in range(answers.shape[0]):
        row = found[i]
        if row >= 0 and answers[i].status == OK and rows[row].generation == answers[i].generation:
            out[i, 0] = tag_in(context, rows, row)
