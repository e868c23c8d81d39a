"""Numbers the kernels share: states, flags, statuses and places in the running totals.

Plain integers, because numba compiles them in, and because reading a member of an IntEnum class
is ten times slower than reading a module's constant on Python 3.11: hot Python code uses these.
`records.py` has the names with their meaning; a test keeps the two equal.
"""

KERNEL = {"cache": True, "nogil": True, "_nrt": False}
"""How every kernel is compiled: they allocate nothing, so numba need not count references, which
it would do with an atomic instruction per array and call."""

WRITING, READABLE = 1, 2

SOFT_PIN, HARD_PIN, GROUPED, TASK, UPSERT, DOOMED = 1, 2, 4, 8, 16, 128
BELOW, OFF_MEMORY = 32, 64

MEMORY, DISK, REMOTE = 0, 1, 2
"""Tiers; the last is `Tier.COLD`, a name that kernels have for a column."""

STORED, REMOVED = 1, 2
"""Kinds of events."""

NOTE_INSERT, NOTE_REMOVE = 1 << 32, 2 << 32
"""Above a row in NOTES: it came, or went; a bare row was read."""

MARK_ENDED = 1 << 32
"""Above a row in MARKS: all that happened to it is that its put was completed."""

OK, NO_SPACE, INVALID_KEY, INVALID_PARAMS = 0, -200, -400, -600
ILLEGAL_CLIENT, INVALID_WRITE, NOT_READY, NOT_FOUND = -601, -700, -703, -704
ALREADY_EXISTS, HAS_LEASE, LEASE_EXPIRED, BUSY = -705, -706, -707, -708
SUPERSEDED, OTHER_NAME, ABSENT = -750, -751, -752
LIMIT_GROUPS = -1752
RETRY, SWAP = 1, 2
"""Internal: clear the row away and ask again; a second generation is complete."""

OBJECTS, UNFINISHED, BYTES, SOFT_PINNED, HARD_BYTES, GENERATION, SINK = 0, 1, 2, 3, 4, 5, 6
MISSING = 7
"""Replicas that readable objects have fewer than they were put for; begun copies count as there."""
HITS, MISSES, READ_BYTES, WRITTEN_BYTES, AWAY, DISK_HITS, COLD_HITS = 8, 9, 10, 11, 12, 13, 14
UNREADY = 15
"""Counters that only grow: keys gets found and did not find, bytes of the former, bytes put, of the
keys not found those on absent segments, of those found those on disks and not in memory, and those
that lie cold alone; and of the keys not found again those that are being written."""
TALLY_WORDS = 16

HOLDERS_MAX = 255
"""Too many grants to be counted: nobody can release the lease any more, it runs to its end."""
HITS_BITS = 12
HITS_MASK = (1 << HITS_BITS) - 1
HITS_WINDOWS = 0xF
SIZE_MAX = 1 << 48
NAME_BYTES_MAX = 4096
