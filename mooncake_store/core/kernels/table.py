"""Kernels of the hash table digest -> row: open addressing with linear probing, grown in steps.

Layout: an entry is one int64, `tag << 32 | row + 1`, 0 when empty; the tag is the low 32 bits of
the digest and also gives the home position, so that moving entries never touches rows. There are
two entry arrays. One is active. While the table changes size the other one still holds entries
that were not moved yet: positions below `CURSOR` have been moved, a deletion leaves DELETED.
`head` is an int64 array indexed by the constants below.

A home is the first of eight entries, a cache line, and probing goes on from there. All eight are
compared at once, so that where among them an entry stands is no branch to mispredict. Entries are
always packed: behind an empty one the rest of its eight are empty as well, and nothing that belongs
to these eight or earlier ones lies beyond.

Every batch kernel first walks the whole batch touching the entry (then the row) each key will
need, without acting on it: those loads are independent, so their cache misses overlap.
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import KERNEL, READABLE
from mooncake_store.core.kernels.lines import LINE, ask_for, first_equal

ACTIVE, MASK, USED, OLD_MASK, CURSOR, FREE_ROWS, ROWS_HIGH, SINK = 0, 1, 2, 3, 4, 5, 6, 7
HEAD_WORDS = 8
LOW = 0xFFFFFFFF
DELETED = -1
HOMES = LOW - LINE + 1
"""What of a tag is a home, under the mask."""
AHEAD = 16
"""Rows between that whose line is fetched and that which is entered."""


@njit(**KERNEL, inline="always")
def vacancy(table, home, mask):
    """Return the first empty position from `home` on. O(1) expected."""
    used = first_equal(table, home, 0, 0)
    p = home + used
    if used == LINE:
        p &= mask
        while table[p] != 0:
            p = (p + 1) & mask
    return p


@njit(**KERNEL)
def _find_in_old(head, old, rows, lo, hi):
    """Look among the entries that were not moved yet; the row or -1. O(1) expected."""
    mask = head[OLD_MASK]
    cursor = head[CURSOR]
    tag = lo & LOW
    p = max(tag & mask & HOMES, cursor)
    for _ in range(mask + 1):
        entry = old[p]
        if entry == 0:
            return -1
        if entry != DELETED and ((entry >> 32) & LOW) == tag:
            row = (entry & LOW) - 1
            if rows[row].digest_lo == lo and rows[row].digest_hi == hi:
                return row
        p += 1
        if p > mask:
            p = cursor
    return -1


@njit(**KERNEL)
def _find_among_equals(table, mask, rows, lo, hi):
    """Look at every entry whose tag is right. O(1) expected."""
    tag = lo & LOW
    p = tag & mask & HOMES
    entry = table[p]
    while entry != 0:
        if ((entry >> 32) & LOW) == tag:
            row = (entry & LOW) - 1
            if rows[row].digest_lo == lo and rows[row].digest_hi == hi:
                return row
        p = (p + 1) & mask
        entry = table[p]
    return -1


@njit(**KERNEL)
def find(head, table_a, table_b, rows, digests, out):
    """out[i] = row of digests[i] or -1. O(n) expected.

    Three passes, so that a loop that waits for memory has no branch that depends on it: touch
    the home entries; find the entry with the right tag, which is the right one but once in
    four billion, and touch its row; compare digests.
    """
    n = digests.shape[0]
    if head[ACTIVE] == 0:
        table, old = table_a, table_b
    else:
        table, old = table_b, table_a
    mask = head[MASK]
    sink = 0
    for i in range(n):
        sink ^= table[digests[i, 0] & HOMES & mask]
    for i in range(n):
        tag = digests[i, 0] & LOW
        p = tag & HOMES & mask
        place = first_equal(table, p, tag, 32)
        row = (table[p + min(place, LINE - 1)] & LOW) - 1
        if place == LINE and row >= 0:  # all eight are in use: it may be further on
            row = _find_among_equals(table, mask, rows, digests[i, 0], digests[i, 1])
        out[i] = row
        sink ^= rows[max(row, 0)].digest_lo
    head[SINK] = sink
    for i in range(n):
        row = out[i]
        if row >= 0 and (
            rows[row].digest_lo != digests[i, 0] or rows[row].digest_hi != digests[i, 1]
        ):
            out[i] = _find_among_equals(table, mask, rows, digests[i, 0], digests[i, 1])
    if head[OLD_MASK] >= 0:
        for i in range(n):
            if out[i] < 0:
                out[i] = _find_in_old(head, old, rows, digests[i, 0], digests[i, 1])


@njit(**KERNEL)
def find_or_insert(head, table_a, table_b, rows, free_rows, digests, status, out, inserted):
    """Find rows, and give a new row to every missing digest whose status is 0. O(n) expected.

    A digest that occurs twice gets its row at the first occurrence, so the second finds it.
    out[i] is -1 where nothing was found and the status forbade a new row, or where no row is
    left. A new row carries its digest and is otherwise empty; inserted[i] tells it apart.
    """
    n = digests.shape[0]
    if head[ACTIVE] == 0:
        table, old = table_a, table_b
    else:
        table, old = table_b, table_a
    mask = head[MASK]
    has_old = head[OLD_MASK] >= 0
    sink = 0
    for i in range(n):
        sink ^= table[digests[i, 0] & HOMES & mask]
    head[SINK] = sink
    for i in range(n):
        lo = digests[i, 0]
        hi = digests[i, 1]
        tag = lo & LOW
        home = tag & HOMES & mask
        place = first_equal(table, home, tag, 32)
        row = (table[home + min(place, LINE - 1)] & LOW) - 1
        if row >= 0 and (place == LINE or rows[row].digest_lo != lo or rows[row].digest_hi != hi):
            row = _find_among_equals(table, mask, rows, lo, hi)
        if row < 0 and has_old:
            row = _find_in_old(head, old, rows, lo, hi)
        inserted[i] = False
        if row < 0 and status[i] == 0:
            if head[FREE_ROWS] > 0:
                head[FREE_ROWS] -= 1
                row = np.int64(free_rows[head[FREE_ROWS]])
            elif head[ROWS_HIGH] < rows.shape[0]:
                row = head[ROWS_HIGH]
                head[ROWS_HIGH] += 1
            if row >= 0:
                rows[row].digest_lo = lo
                rows[row].digest_hi = hi
                table[vacancy(table, home, mask)] = (tag << 32) | (row + 1)
                head[USED] += 1
                inserted[i] = True
        out[i] = row


@njit(**KERNEL)
def enter_rows(head, table, rows, entered, twice):
    """Enter rows that hold objects into an empty table that is large enough. O(n) expected.

    Lists the rows whose digest was entered before them, and returns how many those are.
    """
    mask, count = head[MASK], 0
    for i in range(entered.shape[0]):
        ahead = entered[min(i + AHEAD, entered.shape[0] - 1)]
        ask_for(table, rows[ahead].digest_lo & HOMES & mask)
        row = np.int64(entered[i])
        lo, hi = rows[row].digest_lo, rows[row].digest_hi
        if _find_among_equals(table, mask, rows, lo, hi) >= 0:
            twice[count] = row
            count += 1
            continue
        tag = lo & LOW
        table[vacancy(table, tag & HOMES & mask, mask)] = (tag << 32) | (row + 1)
        head[USED] += 1
    return count


@njit(**KERNEL)
def take_rows(head, free_rows, rows_max, out):
    """Give rows that are in no table (second generations). out[i] = -1 when none is left. O(n)."""
    for i in range(out.shape[0]):
        if head[FREE_ROWS] > 0:
            head[FREE_ROWS] -= 1
            out[i] = free_rows[head[FREE_ROWS]]
        elif head[ROWS_HIGH] < rows_max:
            out[i] = head[ROWS_HIGH]
            head[ROWS_HIGH] += 1
        else:
            out[i] = -1


@njit(**KERNEL)
def _position_in_old(head, old, tag, row):
    """Where (tag, row) stands among the entries not moved yet, or -1. O(1) expected."""
    mask = head[OLD_MASK]
    cursor = head[CURSOR]
    wanted = (tag << 32) | (row + 1)
    p = max(tag & mask & HOMES, cursor)
    for _ in range(mask + 1):
        if old[p] == wanted:
            return p
        if old[p] == 0:
            return -1
        p += 1
        if p > mask:
            p = cursor
    return -1


@njit(**KERNEL, inline="always")
def set_first(rows, row, segment, offset):
    """Write where the first replica of a row is; segments end below 2^48."""
    rows[row].segment = segment
    rows[row].offset_low = offset & 0xFFFFFFFF
    rows[row].offset_high = offset >> 32


@njit(**KERNEL, inline="always")
def is_living(rows, overflow, alive, row):
    """Whether any replica of a readable row can be read. O(replicas)."""
    living = alive[rows[row].segment] != 0
    link = rows[row].more
    while not living and link >= 0:
        living = overflow[link].state == READABLE and alive[overflow[link].segment] != 0
        link = overflow[link].next
    return living


@njit(**KERNEL, inline="always")
def take_link(overflow):
    """Return a free entry for a further replica; there are more of them than anybody needs."""
    link = np.int64(overflow[0].next)
    if link > 0:
        overflow[0].next = overflow[link].next
    else:
        overflow[0].offset += 1
        link = overflow[0].offset
    return link


@njit(**KERNEL, inline="always")
def give_link(overflow, link):
    """Free the entry of a further replica; returns the one after it in its chain."""
    after = overflow[link].next
    overflow[link].state = 0
    overflow[link].next = overflow[0].next
    overflow[0].next = link
    return after


@njit(**KERNEL, inline="always")
def clear_row(rows, row):
    """Make a row what it was before it was first used, but for NIL where links belong."""
    rows[row].digest_lo = 0
    rows[row].digest_hi = 0
    rows[row].size = 0
    rows[row].checksum = 0
    rows[row].lease_end = 0
    rows[row].holder = 0
    rows[row].generation = 0
    rows[row].more = -1
    set_first(rows, row, -1, 0)
    rows[row].hits = 0
    rows[row].state = 0
    rows[row].flags = 0
    rows[row].replicas = 0
    rows[row].holders = 0


@njit(**KERNEL, inline="always")
def drop_entry(head, table, old, mask, has_old, tag, row):
    """Remove the entry of a row, if it has one. O(1) expected.

    The hole is closed by moving later entries of its run back, so lookups never meet debris.
    """
    wanted = (tag << 32) | (row + 1)
    home = tag & HOMES & mask
    place = first_equal(table, home, wanted, 0)
    used = first_equal(table, home, 0, 0)
    if place < used and used < LINE:  # the last of the eight takes its place
        table[home + place] = table[home + used - 1]
        table[home + used - 1] = 0
        head[USED] -= 1
        return
    hole = home
    while table[hole] != wanted and table[hole] != 0:
        hole = (hole + 1) & mask
    if table[hole] == wanted:
        p = (hole + 1) & mask
        entry = table[p]
        while entry != 0:
            home = (entry >> 32) & HOMES & mask
            if ((p - home) & mask) >= ((p - hole) & mask):
                table[hole] = entry
                hole = p
            p = (p + 1) & mask
            entry = table[p]
        table[hole] = 0
        head[USED] -= 1
    elif has_old:
        p = _position_in_old(head, old, tag, row)
        if p >= 0:
            old[p] = DELETED
            head[USED] -= 1


@njit(**KERNEL)
def delete(head, table_a, table_b, rows, free_rows, doomed):
    """Remove rows from the table, clear them and put them on the free stack. O(n).

    A row without an entry (a second generation) is only cleared.
    """
    if head[ACTIVE] == 0:
        table, old = table_a, table_b
    else:
        table, old = table_b, table_a
    mask = head[MASK]
    has_old = head[OLD_MASK] >= 0
    sink = 0
    for i in range(doomed.shape[0]):
        sink ^= table[rows[doomed[i]].digest_lo & HOMES & mask]
    head[SINK] = sink
    for i in range(doomed.shape[0]):
        row = np.int64(doomed[i])
        drop_entry(head, table, old, mask, has_old, rows[row].digest_lo & LOW, row)
        clear_row(rows, row)
        free_rows[head[FREE_ROWS]] = row
        head[FREE_ROWS] += 1


@njit(**KERNEL)
def swap_row(head, table_a, table_b, rows, old_row, new_row):
    """Let the entry of `old_row` name `new_row`, which has the same digest. O(1) expected."""
    if head[ACTIVE] == 0:
        table, old = table_a, table_b
    else:
        table, old = table_b, table_a
    tag = rows[old_row].digest_lo & LOW
    mask = head[MASK]
    wanted = (tag << 32) | (old_row + 1)
    p = tag & HOMES & mask
    while table[p] != wanted and table[p] != 0:
        p = (p + 1) & mask
    if table[p] == wanted:
        table[p] = (tag << 32) | (new_row + 1)
        return True
    if head[OLD_MASK] >= 0:
        p = _position_in_old(head, old, tag, old_row)
        if p >= 0:
            old[p] = (tag << 32) | (new_row + 1)
            return True
    return False


@njit(**KERNEL)
def swap_rows(head, table_a, table_b, rows, old_rows, new_rows):
    """Let the entries of old rows name new ones with the same digests. O(n) expected.

    Returns how many there were.
    """
    count = 0
    for i in range(old_rows.shape[0]):
        count += swap_row(head, table_a, table_b, rows, old_rows[i], new_rows[i])
    return count


@njit(**KERNEL)
def rename_row(head, table_a, table_b, rows, row, low, high):
    """Drop the entry of `row`, give it the digest (low, high), and enter it under that.

    That digest must not be in the table. O(1) expected.
    """
    if head[ACTIVE] == 0:
        table, old = table_a, table_b
    else:
        table, old = table_b, table_a
    mask = head[MASK]
    drop_entry(head, table, old, mask, head[OLD_MASK] >= 0, rows[row].digest_lo & LOW, row)
    rows[row].digest_lo = low
    rows[row].digest_hi = high
    tag = rows[row].digest_lo & LOW
    p = tag & HOMES & mask
    while table[p] != 0:
        p = (p + 1) & mask
    table[p] = (tag << 32) | (row + 1)
    head[USED] += 1


@njit(**KERNEL)
def drain(head, table_a, table_b, count):
    """Move the next `count` positions of the old array into the active one. O(count)."""
    old_mask = head[OLD_MASK]
    if head[ACTIVE] == 0:
        table, old = table_a, table_b
    else:
        table, old = table_b, table_a
    mask = head[MASK]
    stop = min(head[CURSOR] + count, old_mask + 1)
    sink = 0
    for p in range(head[CURSOR], stop):
        sink ^= table[(old[p] >> 32) & HOMES & mask]
    head[SINK] = sink
    for p in range(head[CURSOR], stop):
        entry = old[p]
        if entry != 0 and entry != DELETED:
            q = (entry >> 32) & HOMES & mask
            while table[q] != 0:
                q = (q + 1) & mask
            table[q] = entry
    head[CURSOR] = stop
    if stop > old_mask:
        head[OLD_MASK] = -1


@njit(**KERNEL)
def touch_pages(table, start, stop):
    """Make the pages of entries start..stop real ahead of use. O(stop - start)."""
    step = 4096 // 8
    for p in range(start, stop, step):
        table[p] = 0


def warmup() -> None:
    """Compile every kernel of this file."""
    from mooncake_store.core.records import OVERFLOW, ROW

    head = np.zeros(HEAD_WORDS, np.int64)
    head[MASK], head[OLD_MASK] = 7, -1
    table_a, table_b = np.zeros(8, np.int64), np.zeros(8, np.int64)
    rows, free_rows = np.zeros(4, ROW), np.zeros(4, np.int32)
    digests = np.array([[1, 2]], np.int64)
    out, flags = np.zeros(1, np.int32), np.zeros(1, np.bool_)
    find_or_insert(
        head, table_a, table_b, rows, free_rows, digests, np.zeros(1, np.int16), out, flags
    )
    find(head, table_a, table_b, rows, digests, out)
    swap_rows(head, table_a, table_b, rows, out, out)
    rename_row(head, table_a, table_b, rows, 0, 3, 4)
    drain(head, table_a, table_b, 1)
    delete(head, table_a, table_b, rows, free_rows, out)
    take_rows(head, free_rows, 4, out)
    enter_rows(head, table_a, rows, np.zeros(1, np.int32), out)
    touch_pages(table_a, 0, 8)
    overflow = np.zeros(2, OVERFLOW)
    is_living(rows, overflow, np.zeros(2, np.uint8), 0)
    give_link(overflow, take_link(overflow))
