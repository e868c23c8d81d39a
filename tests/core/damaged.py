"""A model of what is left of a stream that lacks runs; it shares no code with what is tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.records import Flag, State
from tests.core.keeping import objects_of, resting_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from mooncake_store.core.shard import Shard

Runs = list[tuple[int, "NDArray[np.int64]"]]
ROW, ENDED, FREED, FACT, FACT_AGAIN = 1, 2, 3, 6, 9
FLAGS, TWIN, STATE = 3, 9, 0


def cells(runs: Iterable[tuple[int, NDArray[np.int64]]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (position, kind, upper half of the first word, word after it) of all cells."""
    for position, words in runs:
        at = 0
        while at < len(words):
            head = int(words[at])
            size = (head >> 16) & 0xFFFF
            following = int(words[at + 1]) if size > 1 else 0
            yield position + at, head & 0xFF, head >> 32, following
            at += size


def deciding(runs: Runs) -> dict[int, list[int]]:
    """Return of each row that holds something where the cells stand that say what it is."""
    found: dict[int, list[int]] = {}
    for position, kind, row, _ in cells(runs):
        if kind == ROW:
            found[row] = [position]
        elif kind == ENDED:
            found[row].append(position)
        elif kind == FREED:
            found.pop(row, None)
    return found


def is_left(runs: Runs, position: int) -> bool:
    return any(first <= position < first + len(words) for first, words in runs)


def rows_left(whole: Runs, left: Runs) -> set[int]:
    """Return the rows all of whose deciding cells are left."""
    return {
        row
        for row, places in deciding(whole).items()
        if all(is_left(left, place) for place in places)
    }


def facts_left(whole: Runs, left: Runs, since: int) -> bool:
    """Whether all that is no row is left, as it was told first or again."""
    told = {at for at, kind, *_ in cells(whole) if kind == FACT and at >= since}
    known = {at for at, kind, *_ in cells(left) if kind == FACT}
    known |= {first for _, kind, _, first in cells(left) if kind == FACT_AGAIN}
    return told <= known


def keys_of(shard: Shard) -> dict[int, tuple[int, ...]]:
    """The keys of `objects_of` by row."""
    used = np.flatnonzero(shard.rows["state"][: shard.table.rows_high] != State.FREE).tolist()
    names = ("digest_lo", "digest_hi", "generation")
    return {row: tuple(int(shard.rows[row][name]) for name in names) for row in used}


def assert_exact(before: Shard, after: Shard, whole: Runs, left: Runs, since: int) -> int:
    """Compare what is made of a stream that lacks runs with what the whole one makes.

    Returns how many rows are lost.
    """
    after.check_integrity()
    wanted, found = objects_of(before), objects_of(after)
    keys, rows = keys_of(before), rows_left(whole, left)
    lost = [row for row in keys if row not in rows]
    for row in lost:
        key = keys[row]
        assert key not in found, f"row {row}, whose cells are missing, is believed"
        del wanted[key]
    for key, value in found.items():
        assert key in wanted, f"{key} is back"
        assert _untied(value, wanted[key]), f"{key} has changed: {value}, not {wanted[key]}"
    if facts_left(whole, left, since):
        assert found.keys() == wanted.keys(), "more is lost than what the missing words told"
    return len(lost)


def _untied(value: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Whether a row is as it was, but for the tie to another generation that is lost."""
    if value == wanted:
        return True
    told = list(wanted)
    told[FLAGS], told[TWIN] = told[FLAGS] & ~Flag.UPSERT, 0
    return bool(wanted[FLAGS] & Flag.UPSERT) and list(value) == told


def used_by_writers(before: Shard, now: int) -> list[tuple[int, int, int]]:
    """Extents (segment, offset, size) that somebody may still write to, or read under a lease."""
    waiting = [entry[:3] for entry in resting_of(before, now)]
    used = []
    for state, size, *others in objects_of(before).values():
        began = others[-1]
        if state == State.WRITING and began + before.config.put_release_ns > now:
            used += [(segment, offset, size) for segment, offset in others[2]]
    return [*waiting, *used]  # type: ignore[list-item]


def overlapping(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return one[0] == other[0] and one[1] < other[1] + other[2] and other[1] < one[1] + one[2]
