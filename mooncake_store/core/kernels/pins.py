"""Kernels that know who pinned a row hard, so that no client takes the share of all. O(1).

`PINNER` tells for each row that has the flag, `PINNED_OF` adds up by client. Those of clients that
are gone, and of before a restart, are nobody's: client 0.
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import HARD_BYTES, KERNEL
from mooncake_store.core.context import INT64, PINNED_OF, PINNER, TALLY, UINT16
from mooncake_store.core.kernels.columns import column


@njit(**KERNEL, inline="always")
def count_pinned(context, row, nbytes):
    """Note that a row pins more bytes hard, or fewer: in all, and for the client that did it."""
    context[TALLY + HARD_BYTES] += nbytes
    pinner = column(context, PINNER, UINT16)
    column(context, PINNED_OF, INT64)[np.int64(pinner[row])] += nbytes
