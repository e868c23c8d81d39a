"""The times between the tokens of one sequence, by columns of the stretches it lived through.

Array layout, one entry a stretch: `first` is int64, its first step, rising; `step_s` and `slope_s`
are float64, the seconds of that step and what each further one takes more.
"""

# mypy: allow-untyped-defs

import numpy as np

from kernel_cache import njit


@njit(cache=True, nogil=True)
def look_back(first, step_s, slope_s, count, joined, last):
    """Seconds of step `joined`, and the mean of the longest tenth of those after it, before `last`.

    The second is nan where there are none. O(s log s) for s stretches.
    """
    at = np.searchsorted(first[:count], joined, side="right") - 1
    first_s = step_s[at] + slope_s[at] * (joined - first[at])
    begin = at
    end = np.searchsorted(first[:count], last - 1, side="right")
    seconds = np.empty(end - begin)
    times = np.zeros(end - begin, np.int64)
    step, found = joined + 1, 0
    while step < last:
        if at + 1 < count and first[at + 1] <= step:
            at += 1
            continue
        until = last
        if at + 1 < count:
            until = min(until, first[at + 1])
        middle = step - first[at] + (until - step - 1) / 2
        seconds[found] = step_s[at] + slope_s[at] * middle
        times[found] = until - step
        step = until
        found += 1
    if not found:
        return first_s, np.nan
    wanted = max(1, round(0.1 * (last - joined - 1)))
    left, total = wanted, 0.0
    order = np.argsort(seconds[:found])
    for turn in range(found - 1, -1, -1):
        taken = min(times[order[turn]], left)
        total += seconds[order[turn]] * taken
        left -= taken
        if not left:
            break
    return first_s, total / wanted


def warmup() -> None:
    """Compile the kernels. O(1)."""
    look_back(np.zeros(1, np.int64), np.ones(1), np.zeros(1), 1, 0, 2)
