"""How long a prefix SGLang can restore when several pools have to agree.

A hybrid model keeps more than keys and values of a page: states of recurrent layers, windows,
indexes. Each such pool says what it needs: all pages of the prefix, or only the last few. A
recurrent state is stored at some ends only, so five pages may be usable where four are not; every
usable length is answered, because ranks have to find one they all can restore.

O(pages x trailing) a pool, no I/O.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ALL_PAGES", "TRAILING_PAGES", "Need", "Usable", "leading", "usable"]

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"


class Need(NamedTuple):
    """What one pool has, by page, and which of it a prefix needs."""

    pool: str
    policy: str
    trailing: int
    present: list[bool]


class Usable(NamedTuple):
    """Every prefix length that all pools can restore, and how far each pool alone would reach."""

    lengths: list[int]
    reach: dict[str, int]


def leading(present: list[bool]) -> int:
    """The length of the run of True at the beginning."""
    return present.index(False) if False in present else len(present)


def usable(pages: int, needs: list[Need]) -> Usable:
    """Which lengths up to `pages` can be restored. Raises ValueError for an unknown policy."""
    lengths = set(range(1, pages + 1))
    reach: dict[str, int] = {}
    for need in needs:
        if need.policy == ALL_PAGES:
            mine = set(range(1, leading(need.present[:pages]) + 1))
        elif need.policy == TRAILING_PAGES:
            last = max(1, need.trailing)
            mine = {
                end for end in range(1, pages + 1) if all(need.present[max(0, end - last) : end])
            }
        else:
            raise ValueError(f"pool {need.pool} has hit policy {need.policy!r}, not supported")
        if mine:
            reach[need.pool] = max(mine)
        lengths &= mine
    return Usable(sorted(lengths), reach)
