"""What decodes at a moment, by columns of the requests under way.

Array layout, one entry a request or a free place: `begins` is float64, when it decodes from, inf
for a free place; `waits` is bool, whether it has not begun; `tokens` is int64, its context.
"""

# mypy: allow-untyped-defs

import numpy as np

from kernel_cache import njit


@njit(cache=True, nogil=True)
def decode_at(begins, waits, tokens, now, moment, longest_s):
    """How many decode at `moment`, and their tokens, if each does for `longest_s`. O(places).

    One that should have begun already, and has not, is expected to begin now.
    """
    count, total = 0, 0
    since = moment - longest_s
    late = now > since
    for at in range(len(begins)):
        if begins[at] <= moment and (begins[at] > since or (late and waits[at])):
            count += 1
            total += tokens[at]
    return count, total


def warmup() -> None:
    """Compile the kernels. O(1)."""
    begins, waits = np.zeros(1), np.zeros(1, np.bool_)
    decode_at(begins, waits, np.zeros(1, np.int64), 0.0, 0.0, 0.0)
