"""Record layouts of the shard core: what a row, a replica and a reply consist of.

One object is one 64-byte row, so that a lookup costs one cache line beside the hash table's.
What few objects have, or few requests read, lives in separate columns indexed by the same row
(`state.py`); such a column costs memory only where it has been written. Replies are arrays of
packed records: they go onto the wire as they are and are read there with `np.frombuffer`.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np

NIL = -1
SIZE_MAX = 1 << 48
"""Exclusive upper bound of an object's size."""
KEYS_MAX = 65_536
"""Most keys in one request."""
RENAMES_MAX = 512
"""Most pairs in one request of renames: what a shard does in a few milliseconds."""
REPLICAS_REMOVED_MAX = 512
"""Most keys in one request to remove single replicas, for the same reason."""
REPLICAS_MAX = 64
"""Most replicas of one object, those that a copy adds included; a row counts them in one byte."""
SEGMENT_BYTES_MAX = 1 << 47
"""Largest segment: what allocators can divide."""


OF_OTHERS = -1
"""In place of the number of a segment: the device is not of the worker that hauls."""


class Tier(IntEnum):
    """What a segment is made of, and with it a replica that lies there."""

    MEMORY = 0
    DISK = 1
    COLD = 2  # a store elsewhere, which only the owner of the segment reads and writes


TIER_NAMES = tuple(tier.name.lower() for tier in Tier)
"""What users call each."""


class State(IntEnum):
    """Life of a row."""

    FREE = 0
    WRITING = 1
    READABLE = 2


class Flag(IntFlag):
    """Properties of a row; each is one bit of `ROW.flags`."""

    SOFT_PIN = 1
    HARD_PIN = 2
    GROUPED = 4
    TASK = 8  # a copy, move or haul runs
    UPSERT = 16  # READABLE: a newer generation is being written; WRITING: is that generation
    BELOW = 32  # a replica that is complete lies below memory: on a disk, or cold
    OFF_MEMORY = 64  # none lies in memory
    DOOMED = 128  # being removed by the request that runs now


class SegmentState(IntEnum):
    """Life of a segment; only OK takes new objects.

    Replicas on one that is GONE are lost. Those on one that is ABSENT are kept, and cannot be read
    until its worker is back.
    """

    FREE = 0
    OK = 1
    SUSPECT = 2
    DRAINING = 3
    DRAINED = 4
    GONE = 5
    ABSENT = 6


class Status(IntEnum):
    """Result per key; the numbers are those of the drop-in API."""

    OK = 0
    INTERNAL = -1
    SEGMENT_NOT_FOUND = -101
    SEGMENT_ALREADY_EXISTS = -102
    CLIENT_NOT_FOUND = -103
    NO_SPACE = -200
    TOO_LARGE = -201  # ours: no segment could hold it even if empty; the drop-in API says -200
    PINS_FULL = -202  # ours: hard pins have their share of the pool; the drop-in API says -200
    TOO_FEW_SEGMENTS = -203  # ours: for replicas_min, even if empty; the drop-in API says -200
    INVALID_KEY = -400
    INVALID_PARAMS = -600
    ILLEGAL_CLIENT = -601
    INVALID_WRITE = -700
    NOT_READY = -703
    NOT_FOUND = -704
    ALREADY_EXISTS = -705
    HAS_LEASE = -706
    LEASE_EXPIRED = -707
    BUSY = -708
    NO_TASK = -709
    REPLICA_NOT_FOUND = -710
    REPLICA_ALREADY_EXISTS = -711
    REPLICA_IS_GONE = -712
    SUPERSEDED = -750  # ours: a later put of the key took this one's place; the drop-in API says 0
    OTHER_NAME = -751  # ours: an object of another name has this digest; the drop-in API says -600
    ABSENT = -752  # ours: it lies on workers that are absent for now; the drop-in API says -704
    PINNED = -753  # ours: a hint that a pin contradicts; the drop-in API gives no hints
    TASK_NOT_FOUND = -1400
    TASK_LIMIT = -1401
    JOB_NOT_FOUND = -1402
    TENANT_QUOTA = -1700
    TENANT_NOT_REGISTERED = -1701
    LIMIT_BYTES = -1750  # ours, and those below: a limit of who asks; the drop-in API says -200
    LIMIT_PINS = -1751
    LIMIT_GROUPS = -1752


class EventKind(IntEnum):
    """What happened to an object, as told to followers of the event stream."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3  # a tenant has no objects left; the digest is zero


ROW = np.dtype(
    [
        # Digests are held as signed words: numba turns a mix of signed and unsigned into floats.
        ("digest_lo", "<i8"),
        ("digest_hi", "<i8"),
        ("size", "<i8"),
        ("checksum", "<u8"),  # WRITING: the number of the request that began the put
        ("lease_end", "<i8"),  # WRITING: when the put started
        ("offset_low", "<u4"),  # of the first replica
        ("offset_high", "<u2"),
        ("holder", "<u2"),  # who has the lease, see `kernels/leases.py`
        ("generation", "<u4"),
        ("more", "<i4"),  # first further replica in the overflow table, or NIL
        ("segment", "<i2"),  # of the first replica; NIL while none is allocated
        ("hits", "<u2"),  # gets within the current window, and which window that is
        ("state", "u1"),
        ("flags", "u1"),
        ("replicas", "u1"),
        ("holders", "u1"),  # how often the lease was granted
    ]
)
assert ROW.itemsize == 64

COLD = np.dtype(
    [
        ("name_ref", "<i8"),  # see `kernels/names.py`; 0 = no name
        ("created_s", "<u4"),
        ("twin", "<i4"),  # the other generation's row + 1 while an upsert runs, else 0
        ("owner", "<u2"),  # handle of the client that put it
        ("tenant", "<u2"),
        ("wanted", "u1"),  # replicas asked for
        ("pin_level", "u1"),  # of its soft pin: 0 for an ordinary one, see `pinned.py`
        ("tiers", "u1"),  # below memory on which complete replicas lie, 1 << `Tier` each
        ("spare", "u1"),
    ]
)
"""What requests seldom need of a row; 24 bytes."""

OVERFLOW = np.dtype(
    [("offset", "<i8"), ("next", "<i4"), ("segment", "<i2"), ("state", "u1"), ("spare", "u1")]
)
"""A replica after the first, in a chain that begins at `ROW.more`; `state` is READABLE, or WRITING
while a copy fills it. Entry 0 is the head of the free list (`next`) and counts the entries ever
used (`offset`)."""

REPLICA = np.dtype([("offset", "<i8"), ("segment", "<i4"), ("unsure", "<i4")])
"""Where one replica lies, as told to clients. `unsure` is 1 where something else may lie by now:
then nothing is to be believed but what was compared with the checksum of the whole."""

PUT_ROW = np.dtype([("generation", "<u4"), ("status", "<i2"), ("replicas", "<u2")])
"""Answer to one key of put_start; its replicas follow in a flat array, key by key."""

GET_ROW = np.dtype(
    [
        ("size", "<i8"),
        ("checksum", "<u8"),
        ("lease_ns", "<i8"),  # remaining lease, 0 when none was asked for
        ("generation", "<u4"),
        ("status", "<i2"),
        ("replicas", "<u2"),
    ]
)
"""Answer to one key of get; its replicas follow in a flat array, key by key."""

LISTED = np.dtype(
    [
        ("digest_lo", "<u8"),
        ("digest_hi", "<u8"),
        ("size", "<i8"),
        ("created_s", "<u4"),
        ("replicas", "<u2"),
        ("name_bytes", "<u2"),
    ]
)
"""One object of a listing; the names follow as one blob."""

EVENT = np.dtype(
    [
        ("digest_lo", "<u8"),
        ("digest_hi", "<u8"),
        ("kind", "<u2"),
        ("tenant", "<u2"),
        ("tier", "<u4"),  # where it lay then, a `Tier`; that it goes to another is no event
    ]
)
