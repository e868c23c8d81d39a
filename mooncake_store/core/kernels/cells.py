"""Kernels of cells: what a shard writes down of its rows, and how rows are made of that again.

A cell is some words; the first is kind | links << 8 | words << 16 | row << 32. Cells name rows, not
objects, and say all of a row as it is after an operation, never a difference. So what came later
decides, a cell read twice does no harm, and a snapshot is nothing but rows that are written down
once more.

    ROW_CELL      the row, its cold columns with the length of its name for the reference, its pin,
                  (offset, segment | state << 16) of each further replica, its name, and the tag
                  of its content if it has one
    ENDED_CELL    an ordinary put was completed: generation and checksum, and such a tag
    FREED_CELL    the row holds nothing

Kinds from TOLD on are for `journal.py`; here they only end a run. Words that were read from files
have been compared with their checksums, so what is wrong in them was written wrong; still nothing
here reads or writes beyond its arrays because of it. Layouts are those of `records.py`, places in
`context` those of `context.py`. All kernels are O(n + replicas + bytes of names).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core import ring
from mooncake_store.core.codes import (
    GENERATION,
    GROUPED,
    KERNEL,
    MARK_ENDED,
    READABLE,
    WRITING,
)
from mooncake_store.core.context import (
    CELLS,
    CELLS_END,
    COLD_ROWS,
    COLD_WORDS,
    EVENTS_NEXT,
    INT64,
    MARKED,
    MARKS,
    NAME_HEADS,
    NAME_WORDS,
    OVERFLOW_ROWS,
    PIN_ENDS,
    RING_HEADER,
    ROW_WORDS,
    ROWS,
    TABLE,
    TAGS,
    TAGS_USED,
    TALLY,
)
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.names import LENGTH_BITS, LENGTH_MASK, give_blocks, take_blocks
from mooncake_store.core.kernels.table import ROWS_HIGH, clear_row, give_link, take_link
from mooncake_store.core.kernels.tags import tag_in
from mooncake_store.core.records import COLD, OVERFLOW, ROW

ROW_CELL, ENDED_CELL, FREED_CELL, TOLD = 1, 2, 3, 4
ROW_MASK = MARK_ENDED - 1

PIN = 12
"""Where in a ROW_CELL the end of the pin stands, after eight words of the row and three of `cold`;
further replicas, the name and the tag follow."""
NAME_LENGTH = 9
ENDED_WORDS = 3
CELL_WORDS_MAX = PIN + 1 + 2 * 63 + 512 + 1


@njit(**KERNEL, inline="always")
def put_word(cells, at, word):
    """Write a word at a position of the endless stream."""
    cells[at & (cells.shape[0] - 1)] = word


@njit(**KERNEL, inline="always")
def keep_tag(context, row, tag):
    """Keep the tag of the content of a row that becomes readable, 0 for none. O(1)."""
    if tag != 0:
        context[TAGS_USED] = 1
    if context[TAGS_USED] != 0:
        column(context, TAGS, INT64)[row] = tag


@njit(**KERNEL)
def links_of(rows, overflow, row):
    """How many replicas a row has behind its first. O(replicas)."""
    links = 0
    link = rows[row].more
    while link >= 0:
        links += 1
        link = overflow[link].next
    return links


@njit(**KERNEL)
def write_row(context, row, at):
    """Write down all of a row at a position that has CELL_WORDS_MAX of room; returns the words."""
    cells = column(context, CELLS, INT64)
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    row_words, cold_words = column(context, ROW_WORDS, INT64), column(context, COLD_WORDS, INT64)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    links = links_of(rows, overflow, row)
    length = cold[row].name_ref & LENGTH_MASK
    name_words = (length + 7) >> 3
    tag = tag_in(context, rows, row)
    words = PIN + 1 + 2 * links + name_words + (tag != 0)
    put_word(cells, at, ROW_CELL | links << 8 | words << 16 | row << 32)
    for j in range(8):
        put_word(cells, at + 1 + j, row_words[8 * row + j])
    for j in range(3):
        put_word(cells, at + NAME_LENGTH + j, cold_words[3 * row + j])
    put_word(cells, at + NAME_LENGTH, length)
    put_word(cells, at + PIN, column(context, PIN_ENDS, INT64)[row])
    at += PIN + 1
    link = rows[row].more
    while link >= 0:
        put_word(cells, at, overflow[link].offset)
        state = np.int64(overflow[link].state)
        put_word(cells, at + 1, np.int64(overflow[link].segment) | state << 16)
        at += 2
        link = overflow[link].next
    names = column(context, NAME_WORDS, INT64)
    first = cold[row].name_ref >> LENGTH_BITS
    for j in range(name_words):
        put_word(cells, at + j, names[first + j])
    if tag != 0:
        put_word(cells, at + name_words, tag)
    return words


@njit(**KERNEL)
def write_marked(context, first, room):
    """Write down the rows in MARKS from place `first` on, as long as there is room for any.

    Returns the place to go on with.
    """
    cells, marks = column(context, CELLS, INT64), column(context, MARKS, INT64)
    rows = column(context, ROWS, ROW)
    at = context[CELLS_END]
    stop = at + room - CELL_WORDS_MAX
    place = first
    while place < context[MARKED] and at <= stop:
        row = marks[place] & ROW_MASK
        if rows[row].state == 0:
            put_word(cells, at, FREED_CELL | 1 << 16 | row << 32)
            at += 1
        elif marks[place] & MARK_ENDED:
            tag = tag_in(context, rows, row)
            words = ENDED_WORDS + (tag != 0)
            put_word(cells, at, ENDED_CELL | words << 16 | row << 32)
            put_word(cells, at + 1, np.int64(rows[row].generation))
            put_word(cells, at + 2, np.int64(rows[row].checksum))
            if tag != 0:
                put_word(cells, at + 3, tag)
            at += words
        else:
            at += write_row(context, row, at)
        place += 1
    context[CELLS_END] = at
    return place


@njit(**KERNEL)
def tell_beside(context, now):
    """Write what the header says beside HEAD, which the caller moves when this is done."""
    header = column(context, RING_HEADER, INT64)
    header[ring.EVENTS_NEXT] = context[EVENTS_NEXT]
    header[ring.GENERATION] = context[TALLY + GENERATION]
    header[ring.NOW] = now


@njit(**KERNEL)
def write_plain(context, now):
    """Write down all rows in MARKS, and what the header says beside HEAD; whether it did.

    It does not where there may be no room for all, or one is in a group, of which is told as well.
    """
    marks, rows = column(context, MARKS, INT64), column(context, ROWS, ROW)
    used = context[CELLS_END] - column(context, RING_HEADER, INT64)[ring.WRITTEN]
    room = column(context, CELLS, INT64).shape[0] - used
    if (context[MARKED] + 1) * CELL_WORDS_MAX > room:
        return False
    for place in range(context[MARKED]):
        row = marks[place] & ROW_MASK
        if rows[row].state != 0 and rows[row].flags & GROUPED:
            return False
    write_marked(context, 0, room)
    context[MARKED] = 0
    tell_beside(context, now)
    return True


@njit(**KERNEL)
def words_marked(context):
    """How many words the rows in MARKS take."""
    marks, rows = column(context, MARKS, INT64), column(context, ROWS, ROW)
    cold = column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    words = 0
    for place in range(context[MARKED]):
        row = marks[place] & ROW_MASK
        if rows[row].state == 0:
            words += 1
        else:
            words += tag_in(context, rows, row) != 0
            if marks[place] & MARK_ENDED:
                words += ENDED_WORDS
                continue
            length = cold[row].name_ref & LENGTH_MASK
            words += PIN + 1 + 2 * links_of(rows, overflow, row) + ((length + 7) >> 3)
    return words


@njit(**KERNEL)
def write_words(context, words):
    """Write words at the end of the stream. The caller made room."""
    cells = column(context, CELLS, INT64)
    at = context[CELLS_END]
    for j in range(words.shape[0]):
        put_word(cells, at + j, words[j])
    context[CELLS_END] = at + words.shape[0]


@njit(**KERNEL)
def mark_used(context, start, stop):
    """Mark all rows of a range that hold anything. The caller made room in MARKS."""
    rows, marks = column(context, ROWS, ROW), column(context, MARKS, INT64)
    marked = context[MARKED]
    for row in range(start, stop):
        if rows[row].state != 0:
            marks[marked] = row
            marked += 1
    context[MARKED] = marked


@njit(**KERNEL)
def vacate(context, row):
    """Make a row empty, whatever it held, and give its further replicas and its name back."""
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    if rows[row].state != 0:
        link = rows[row].more
        while link >= 0:
            link = give_link(overflow, link)
        words, heads = column(context, NAME_WORDS, INT64), column(context, NAME_HEADS, INT64)
        give_blocks(words, heads, cold, row)
        clear_row(rows, row)
        column(context, PIN_ENDS, INT64)[row] = 0


@njit(**KERNEL)
def vacate_rows(context, rows):
    """Make rows empty, whatever they held."""
    for i in range(rows.shape[0]):
        vacate(context, rows[i])


@njit(**KERNEL)
def keep_name(context, cells, at, length):
    """Keep a name that stands in cells; returns its reference, 0 where there is no room."""
    words, heads = column(context, NAME_WORDS, INT64), column(context, NAME_HEADS, INT64)
    blocks = (length + 7) >> 3
    block = take_blocks(words, heads, blocks)
    if block == 0:
        return np.int64(0)
    for j in range(blocks):
        words[block + j] = cells[at + j]
    return block << LENGTH_BITS | length


@njit(**KERNEL)
def read_row(context, cells, at, row, links, length, tag):
    """Make a row what its cell says. False where the further replicas or names find no room."""
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    row_words, cold_words = column(context, ROW_WORDS, INT64), column(context, COLD_WORDS, INT64)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    vacate(context, row)
    for j in range(8):
        row_words[8 * row + j] = cells[at + 1 + j]
    for j in range(3):
        cold_words[3 * row + j] = cells[at + NAME_LENGTH + j]
    cold[row].name_ref = 0
    rows[row].more = -1
    column(context, PIN_ENDS, INT64)[row] = cells[at + PIN]
    keep_tag(context, row, tag)
    at += PIN + 1
    last = -1
    for _ in range(links):
        if overflow[0].next <= 0 and overflow[0].offset + 1 >= overflow.shape[0]:
            return False
        link = take_link(overflow)
        overflow[link].offset = cells[at]
        overflow[link].segment = cells[at + 1] & 0xFFFF
        overflow[link].state = cells[at + 1] >> 16
        overflow[link].next = -1
        if last < 0:
            rows[row].more = link
        else:
            overflow[last].next = link
        last = link
        at += 2
    if length > 0:
        cold[row].name_ref = keep_name(context, cells, at, length)
        return cold[row].name_ref != 0
    return True


@njit(**KERNEL)
def read_cells(context, cells, first):
    """Do what cells of rows say, from place `first` on.

    Returns the place of the first cell that is none of a row, or makes no sense; that may be the
    end. Nothing but the rows and their names is right afterwards: no table, no totals, no space.
    """
    rows = column(context, ROWS, ROW)
    at, high = first, context[TABLE + ROWS_HIGH]
    while at < cells.shape[0]:
        kind, links = cells[at] & 0xFF, (cells[at] >> 8) & 0xFF
        words, row = (cells[at] >> 16) & 0xFFFF, cells[at] >> 32
        if kind < ROW_CELL or kind >= TOLD or words < 1 or at + words > cells.shape[0]:
            break
        if row < 0 or row >= rows.shape[0]:
            break
        if kind == ROW_CELL:
            if words <= PIN:
                break
            length = cells[at + NAME_LENGTH]
            tags = words - (PIN + 1 + 2 * links + ((length + 7) >> 3))
            if length < 0 or tags < 0 or tags > 1:
                break
            tag = cells[at + words - 1] if tags else np.int64(0)
            if not read_row(context, cells, at, row, links, length, tag):
                break
            high = max(high, row + 1)
        elif kind == FREED_CELL:
            vacate(context, row)
        elif words != ENDED_WORDS and words != ENDED_WORDS + 1:
            break
        else:
            if rows[row].state == WRITING and np.int64(rows[row].generation) == cells[at + 1]:
                rows[row].state = READABLE
                rows[row].checksum = np.uint64(cells[at + 2])
                keep_tag(context, row, cells[at + 3] if words > ENDED_WORDS else np.int64(0))
                rows[row].lease_end = 0
                rows[row].holders = 0
        at += words
    context[TABLE + ROWS_HIGH] = high
    return at


@njit(**KERNEL)
def next_told(cells, first, stop):
    """Return the place of the next cell, from that at `first` on, that is none of a row.

    Or of the first that begins at `stop` or behind it, or of what is no cell, if that comes before;
    len(cells) where none does. O(cells).
    """
    at = first
    while at < min(stop, cells.shape[0]):
        words = (cells[at] >> 16) & 0xFFFF
        if (cells[at] & 0xFF) >= TOLD or words < 1 or at + words > cells.shape[0]:
            return at
        at += words
    return at


@njit(**KERNEL)
def grouped_rows(context, first, out):
    """List the rows in as many marks from `first` on that are in groups; returns how many."""
    rows, marks = column(context, ROWS, ROW), column(context, MARKS, INT64)
    found = 0
    for place in range(first, first + out.shape[0]):
        row = marks[place] & ROW_MASK
        if rows[row].state != 0 and rows[row].flags & GROUPED:
            out[found] = row
            found += 1
    return found


@njit(**KERNEL)
def next_about(cells, first, low, high, rows):
    """Find the next cell about an object from place `first` on, len(cells) if there is none.

    It is one that names its digest, or its row: `rows`, as many as may hold generations of it at
    once, has those found so far, -1 where there is none. Rows that another object takes are
    dropped. Ends as well at what is no cell.
    """
    at = first
    while at < cells.shape[0]:
        kind, words, row = cells[at] & 0xFF, (cells[at] >> 16) & 0xFFFF, cells[at] >> 32
        if words < 1 or at + words > cells.shape[0]:
            return cells.shape[0]
        if kind < TOLD:
            place = -1
            for j in range(rows.shape[0]):
                if rows[j] == row:
                    place = j
            if kind == ROW_CELL and words > PIN:
                same = cells[at + 1] == low and cells[at + 2] == high
                if not same and place >= 0:
                    rows[place] = -1
                    place = -1
                if same and place < 0:
                    for j in range(rows.shape[0]):
                        if rows[j] < 0:
                            place = j
                    rows[max(place, 0)] = row
                if same:
                    return at
            elif place >= 0:
                return at
        at += words
    return at
