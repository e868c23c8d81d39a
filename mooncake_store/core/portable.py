"""Objects as plain columns that say nothing of how a shard lays them out, and back.

    for rows in readable_rows(shard):
        objects = objects_of(shard, rows)       # columns
    cells_of(objects, first_row)                # words that `restore` makes the same objects of

For what another version, or another program, is to read: layouts of rows and cells change, these
columns are added to. Only readable objects are portable. Who leases them is not told, as `restore`
would not believe it, and what an unfinished put writes to is told as space that waits
(`unfinished_extents`). O(n + replicas + bytes of names), in as much memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core.facts import MembersFact
from mooncake_store.core.journal import fact_cell
from mooncake_store.core.kernels import cells as k
from mooncake_store.core.reads import extents_of
from mooncake_store.core.records import COLD, REPLICAS_MAX, ROW, State
from mooncake_store.core.space import writers_of
from mooncake_store.core.state import MEMBERS_PER_FACT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from mooncake_store.core.shard import Shard

__all__ = [
    "ROWS_AT_ONCE",
    "Objects",
    "cells_of",
    "objects_of",
    "readable_rows",
    "unfinished_extents",
]

ROWS_AT_ONCE = 16_384
_PINS = c.SOFT_PIN | c.HARD_PIN


class Objects(NamedTuple):
    """Some objects: a column has an entry for each, where nothing else is said."""

    digests: NDArray[np.uint64]
    """Two words each."""
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    tags: NDArray[np.uint64]
    """Of their content, by their writers; 0 is none."""
    generations: NDArray[np.uint32]
    created_s: NDArray[np.int64]
    """Seconds of the shard's clock, like..."""
    used_ns: NDArray[np.int64]
    """...when its last lease known of ended, and..."""
    pinned_until_ns: NDArray[np.int64]
    """...when its soft pin does."""
    pins: NDArray[np.uint8]
    """1: softly, 2: hard, 3: both."""
    namespaces: NDArray[np.uint16]
    writers: NDArray[np.uint16]
    """Handles of clients."""
    wanted: NDArray[np.uint8]
    """Replicas asked for."""
    replicas: NDArray[np.uint8]
    """Replicas there are: so many entries each object has in the next two columns."""
    segments: NDArray[np.int64]
    offsets: NDArray[np.int64]
    name_bytes: NDArray[np.uint16]
    names: bytes
    """One behind the other."""
    groups: NDArray[np.uint32]
    """Places in the next one, from 1; 0 is no group."""
    group_names: tuple[str, ...]

    def check(self) -> None:
        """Raise ValueError for columns that do not belong together."""
        count = len(self.sizes)
        flat = self.segments, self.offsets, self.digests, self.names, self.group_names
        for name, column in self._asdict().items():
            if not any(column is each for each in flat) and len(column) != count:
                raise ValueError(f"{name} has {len(column)} entries, not {count}")
        places = int(self.replicas.sum(dtype=np.int64))
        if len(self.digests) != count or not len(self.segments) == len(self.offsets) == places:
            raise ValueError("digests, or places, are of another number of objects")
        if int(self.name_bytes.sum(dtype=np.int64)) != len(self.names):
            raise ValueError("the names have another length than they say")
        if count and int(self.groups.max()) > len(self.group_names):
            raise ValueError("an object is in a group that has no name")
        if count and not (
            1 <= int(self.replicas.min()) <= int(self.replicas.max()) <= REPLICAS_MAX
            and int(self.name_bytes.max()) <= c.NAME_BYTES_MAX
            and int(self.pins.max()) <= _PINS
        ):
            raise ValueError("an object has no place, or too many, or a name or pin that cannot be")
        if places and not (
            0 <= int(self.segments.min()) <= int(self.segments.max()) < 1 << 15
            and 0 <= int(self.offsets.min()) <= int(self.offsets.max()) < 1 << 48
        ):
            raise ValueError("an object lies where nothing can lie")


def readable_rows(shard: Shard) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of all readable objects, some at a time."""
    for first in range(0, shard.table.rows_high, ROWS_AT_ONCE):
        stop = min(first + ROWS_AT_ONCE, shard.table.rows_high)
        rows = first + np.flatnonzero(shard.rows["state"][first:stop] == State.READABLE)
        if len(rows):
            yield rows


def objects_of(shard: Shard, rows: NDArray[np.int64]) -> Objects:
    """Return readable objects as columns."""
    records, cold = shard.rows[rows], shard.cold[rows]
    _, segments, offsets = extents_of(shard, rows)
    names, lengths = shard.names.gather(rows.astype(np.int32))
    groups, group_names = _groups_of(shard, rows)
    return Objects(
        digests=shard.digests(rows),
        sizes=records["size"].copy(),
        checksums=records["checksum"].copy(),
        tags=shard.tags[rows].view(np.uint64),
        generations=records["generation"].copy(),
        created_s=cold["created_s"].astype(np.int64),
        used_ns=records["lease_end"].copy(),
        # Of others it may be what a put left behind.
        pinned_until_ns=np.where(records["flags"] & c.SOFT_PIN, shard.pin_ends[rows], 0),
        pins=records["flags"] & np.uint8(_PINS),
        namespaces=cold["tenant"].copy(),
        writers=cold["owner"].copy(),
        wanted=cold["wanted"].copy(),
        replicas=records["replicas"].copy(),
        segments=segments.copy(),
        offsets=offsets.copy(),
        name_bytes=lengths,
        names=names,
        groups=groups,
        group_names=group_names,
    )


def _groups_of(shard: Shard, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint32], tuple[str, ...]]:
    """Return which of some groups each row is in, counted from 1, and their names."""
    groups, known = np.zeros(len(rows), np.uint32), dict[str, int]()
    for at in np.flatnonzero(shard.rows["flags"][rows] & c.GROUPED).tolist():
        name = shard.groups.name(int(rows[at]))
        if name:
            groups[at] = known.setdefault(name, len(known) + 1)
    return groups, tuple(known)


def unfinished_extents(shard: Shard) -> NDArray[np.int64]:
    """Return where unfinished puts may write: segment, offset, size, writer, until."""
    state = shard.rows["state"][: shard.table.rows_high]
    row, segment, offset = extents_of(shard, np.flatnonzero(state == State.WRITING))
    records = shard.rows[row]
    writer = writers_of(shard.cold["owner"][row], records["generation"])
    until = records["lease_end"] + shard.config.put_release_ns
    return np.stack([segment, offset, records["size"], writer, until], axis=1)


def cells_of(objects: Objects, first_row: int) -> Iterator[NDArray[np.int64]]:
    """Yield the words that say that objects lie in the rows from `first_row` on.

    To be checked before; what cannot be all the same is found by `restore`.
    """
    count = len(objects.sizes)
    rows = np.arange(first_row, first_row + count)
    links = objects.replicas.astype(np.int64) - 1
    name_words = (objects.name_bytes.astype(np.int64) + 7) >> 3
    tagged = objects.tags != 0
    words = k.PIN + 1 + 2 * links + name_words + tagged
    begins = np.cumsum(words) - words
    out = np.zeros(int(words.sum()), np.int64)
    out[begins] = k.ROW_CELL | links << 8 | words << 16 | rows << 32
    firsts = np.cumsum(objects.replicas, dtype=np.int64) - objects.replicas
    fixed = begins[:, None] + 1
    out[fixed + np.arange(8)] = _records(objects, firsts).view(np.int64).reshape(count, 8)
    out[fixed + 8 + np.arange(3)] = _cold(objects).view(np.int64).reshape(count, 3)
    out[begins + k.PIN] = objects.pinned_until_ns
    out[(begins + words - 1)[tagged]] = objects.tags[tagged].view(np.int64)
    further = np.ones(len(objects.segments), np.bool_)
    further[firsts] = False
    nth = _counted(links)
    at = np.repeat(begins + k.PIN + 1, links) + 2 * nth
    out[at] = objects.offsets[further]
    out[at + 1] = objects.segments[further] | int(State.READABLE) << 16
    lengths = objects.name_bytes.astype(np.int64)
    named = np.repeat(8 * (begins + k.PIN + 1 + 2 * links), lengths) + _counted(lengths)
    out.view(np.uint8)[named] = np.frombuffer(objects.names, np.uint8)
    yield out
    yield from _member_cells(objects, first_row)


def _counted(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count from 0 within each of some runs of these lengths, one behind the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


def _records(objects: Objects, firsts: NDArray[np.int64]) -> NDArray[np.void]:
    out = np.zeros(len(objects.sizes), ROW)
    words = objects.digests.view(np.int64)
    offsets = objects.offsets[firsts]
    grouped = (objects.groups != 0) * np.uint8(c.GROUPED)
    for name, column in (
        ("digest_lo", words[:, 0]),
        ("digest_hi", words[:, 1]),
        ("size", objects.sizes),
        ("checksum", objects.checksums),
        ("lease_end", objects.used_ns),
        ("offset_low", offsets & 0xFFFF_FFFF),
        ("offset_high", offsets >> 32),
        ("generation", objects.generations),
        ("more", -1),
        ("segment", objects.segments[firsts]),
        ("state", State.READABLE),
        ("flags", objects.pins | grouped),
        ("replicas", objects.replicas),
    ):
        out[name] = column
    return out


def _cold(objects: Objects) -> NDArray[np.void]:
    """The length of a name stands where a shard has its reference."""
    out = np.zeros(len(objects.sizes), COLD)
    out["name_ref"] = objects.name_bytes
    out["created_s"] = objects.created_s
    out["owner"] = objects.writers
    out["tenant"] = objects.namespaces
    out["wanted"] = objects.wanted
    return out


def _member_cells(objects: Objects, first_row: int) -> Iterator[NDArray[np.int64]]:
    members = [
        (first_row + at, int(objects.generations[at]), objects.group_names[objects.groups[at] - 1])
        for at in np.flatnonzero(objects.groups).tolist()
    ]
    for first in range(0, len(members), MEMBERS_PER_FACT):
        yield fact_cell(MembersFact(tuple(members[first : first + MEMBERS_PER_FACT])))
