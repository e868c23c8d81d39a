"""What decodes on an instance at a moment, by columns of the requests under way.

Array layout, one entry a request or a free place: `begins` is float64, when it decodes from, inf
for a free place; `tokens` is int64, its context; `where` is int64, the number of its instance.
"""

# mypy: allow-untyped-defs

import math

import numpy as np

from kernel_cache import njit


@njit(cache=True, nogil=True)
def decode_at(begins, tokens, where, instance, now, moment, until, mean_s):
    """How many of an instance's requests are expected to decode, and their tokens. O(places).

    Those that begin by `moment`, less those that end by `until`, each as likely in any second if
    decodes last `mean_s`. One that should have begun already, and has not, begins now.
    """
    count, total = 0.0, 0.0
    rate = 1.0 / max(mean_s, 1e-9)
    for at in range(len(begins)):
        if where[at] != instance or begins[at] > moment:
            continue
        passed_s = until - max(begins[at], now)
        there = math.exp(-passed_s * rate) if passed_s > 0.0 else 1.0
        count += there
        total += there * tokens[at]
    return count, total


def warmup() -> None:
    """Compile the kernels. O(1)."""
    begins, tokens = np.zeros(1), np.zeros(1, np.int64)
    decode_at(begins, tokens, tokens, 0, 0.0, 0.0, 1.0, 1.0)
