"""Groups: objects that live and leave together (layers or ranks of one KV block, sidecars).

Members form a doubly linked list through two columns, so a group of any size costs 12 bytes per
member and nothing for objects without a group.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kernel_cache.columns import reserve

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Groups"]


class Groups:
    """Row -> group and group -> rows. Row numbers are stored plus one; zero is "none"."""

    def __init__(self, rows_max: int) -> None:
        self._group = reserve(rows_max, np.int32)
        self._next = reserve(rows_max, np.int32)
        self._before = reserve(rows_max, np.int32)
        self._first: dict[int, int] = {}
        self._numbers: dict[tuple[int, str], int] = {}
        self._names: dict[int, tuple[int, str]] = {}
        self._last_number = 0
        self.of: Counter[int] = Counter()
        """How many there are, by tenant."""

    def __len__(self) -> int:
        return len(self._first)

    def add(self, row: int, tenant: int, name: str) -> None:
        """Make a row a member of a group, which is created when new. O(1)."""
        number = self._numbers.get((tenant, name))
        if number is None:
            self._last_number += 1
            number = self._last_number
            self._numbers[tenant, name] = number
            self._names[number] = (tenant, name)
            self.of[tenant] += 1
        first = self._first.get(number, 0)
        self._group[row] = number
        self._before[row] = 0
        self._next[row] = first
        if first:
            self._before[first - 1] = row + 1
        self._first[number] = row + 1

    def remove(self, row: int) -> None:
        """Take a row out of its group; the last one out ends the group. O(1)."""
        number = int(self._group[row])
        if not number:
            return
        before, after = int(self._before[row]), int(self._next[row])
        if after:
            self._before[after - 1] = before
        if before:
            self._next[before - 1] = after
        elif after:
            self._first[number] = after
        else:
            del self._first[number]
            name = self._names.pop(number)
            del self._numbers[name]
            self.of[name[0]] -= 1
        self._group[row] = self._next[row] = self._before[row] = 0

    def has(self, tenant: int, name: str) -> bool:
        """Whether there is a group of this name."""
        return (tenant, name) in self._numbers

    def number(self, row: int) -> int:
        """Return the group number of a row, 0 when it has none."""
        return int(self._group[row])

    def name(self, row: int) -> str:
        """Return the group name of a row, "" when it has none."""
        number = int(self._group[row])
        return self._names[number][1] if number else ""

    def members(self, number: int) -> Iterator[int]:
        """Yield the rows of a group."""
        link = self._first.get(number, 0)
        while link:
            yield link - 1
            link = int(self._next[link - 1])

    def check_integrity(self) -> None:
        """Every list is consistent and every name leads to a group."""
        assert set(self._first) == set(self._names), "a group without members is remembered"
        counted = Counter(tenant for tenant, _ in self._names.values())
        assert +self.of == counted, "groups of tenants"
        for number in self._first:
            before = 0
            for row in self.members(number):
                assert self._group[row] == number, f"row {row} is listed in a group it denies"
                assert self._before[row] == before, f"row {row} points back wrongly"
                before = row + 1
