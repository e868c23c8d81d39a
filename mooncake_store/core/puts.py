"""Puts: start (claim rows, find space), end, revoke, and upserts beside a readable generation.

Whoever begins a put that takes another's place does so in `overtaking.py`: beside it, until the
new one has its space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core import context as places
from mooncake_store.core.allowances import limits_bytes
from mooncake_store.core.kernels import writes as k
from mooncake_store.core.names import as_lengths
from mooncake_store.core.options import DEFAULTS, SoftPin, StartOptions
from mooncake_store.core.overtaking import begin_beside, leaving_bytes, settle
from mooncake_store.core.placing import keeps_pin, place
from mooncake_store.core.records import (
    KEYS_MAX,
    PUT_ROW,
    REPLICA,
    REPLICAS_MAX,
    Flag,
    Status,
)
from mooncake_store.core.space import writers_of
from mooncake_store.core.spreading import SPREAD_RUN
from mooncake_store.core.state import INT64, UINT32, UINT64, ShardState, as_column, as_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.names import Names
    from mooncake_store.core.overtaking import Beside, Who

__all__ = ["put_end", "put_revoke", "put_start", "upsert_start"]

NO_LENGTHS = as_lengths(np.empty(0, np.uint32))
DISABLE_PIN = -1
"""In `pin_ends` of a second generation: do not inherit the soft pin."""


def put_start(
    state: ShardState,
    client: int,
    tenant: int,
    digests: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    names: Names | None = None,
    options: StartOptions = DEFAULTS,
    request: int = 0,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Begin objects: (PUT_ROW per key, REPLICA per replica of the accepted keys, in order).

    Every replica lies on a segment of its own; fewer than asked is success if at least
    `replicas_min` fit. Where nothing fits, cold objects are evicted first.
    By the number of the request `lost_answers` finds what it began; 0: nobody asks again.
    """
    n = len(digests)
    refusal = _refusal(state, client, tenant, n, sizes, names, options)
    if refusal != c.OK:
        return _all_refused(n, refusal)
    words, sizes = as_words(digests), as_column(sizes, INT64)
    lengths = NO_LENGTHS if names is None else as_lengths(names.lengths)
    who = client, tenant, request
    answers, replicas = np.empty(n, PUT_ROW), np.empty(n * options.replicas, REPLICA)
    begun, placed, retries = 0, 0, 0
    if options.plain:
        begun, placed, retries = _start_runs(state, who, words, sizes, lengths, answers, replicas)
        if begun == n and not retries:
            if names is None or not state.names.store(state.found[:n], state.status[:n], names):
                return answers, replicas if placed == n else replicas[:placed]
            found, status = state.found[:n].copy(), state.status[:n].copy()
            _refuse_nameless(state, found, names, status)
            return _told(state, found, status, answers, replicas)
    # What follows uses the same scratch.
    found, status = state.found[:n].copy(), state.status[:n].copy()
    status[begun:] = c.OK
    wish = options.replicas, state.config.put_discard_ns
    rest = slice(begun, n)
    _claim(state, who, words[rest], sizes[rest], lengths[rest], wish, status[rest], found[rest])
    late = np.flatnonzero(status == c.RETRY)
    beside = None
    if len(late):
        # Of equal keys the first is begun.
        _, first = np.unique(found[late], return_index=True)
        status[late] = c.ALREADY_EXISTS
        at = late[np.sort(first)]
        beside = begin_beside(state, who, sizes, options.replicas, status, found, at, True)
    _fill(state, who, found, sizes, options, status, beside)
    return _answer(state, found, names, status, answers, replicas, beside)


def upsert_start(
    state: ShardState,
    client: int,
    tenant: int,
    digests: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    names: Names | None = None,
    options: StartOptions = DEFAULTS,
    request: int = 0,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Begin new generations; a readable one stays readable until put_end swaps its successor in."""
    n = len(digests)
    refusal = _refusal(state, client, tenant, n, sizes, names, options)
    if refusal != c.OK:
        return _all_refused(n, refusal)
    words, sizes = as_words(digests), as_column(sizes, INT64)
    status = np.zeros(n, np.int16)
    status[(sizes <= 0) | (sizes >= c.SIZE_MAX)] = c.INVALID_PARAMS
    if names is not None:
        status[names.lengths > c.NAME_BYTES_MAX] = c.INVALID_KEY
    # Of equal keys the last one is begun: the others would be pre-empted by it.
    sound = np.flatnonzero(status == c.OK)[::-1]
    _, last = np.unique(words[sound], axis=0, return_index=True)
    passed = np.delete(sound, last)
    status[passed] = c.SUPERSEDED
    _stop_hauls(state, words, status)
    found = np.empty(len(words), np.int32)
    who = client, tenant, request
    lengths = NO_LENGTHS if names is None else as_lengths(names.lengths)
    wish = options.replicas, 0
    _claim(state, who, words, sizes, lengths, wish, status, found)
    late = np.flatnonzero(status == c.RETRY)
    complete = state.rows["state"][found[late]] == c.READABLE  # if not to be read now
    status[late[complete]] = c.ALREADY_EXISTS
    if names is not None:
        state.names.refuse_others(found, status, names)
    at = np.flatnonzero((status == c.ALREADY_EXISTS) | (status == c.RETRY))
    beside = begin_beside(state, who, sizes, options.replicas, status, found, at, False)
    _fill(state, who, found, sizes, options, status, beside)
    answers, replicas = np.empty(n, PUT_ROW), np.empty(n * options.replicas, REPLICA)
    return _answer(state, found, names, status, answers, replicas, beside)


def _refusal(
    state: ShardState,
    client: int,
    tenant: int,
    n: int,
    sizes: NDArray[np.int64],
    names: Names | None,
    options: StartOptions,
) -> int:
    """Why a whole batch is refused, OK where the arguments of a put make sense."""
    if client not in state.client_by_handle:
        return Status.CLIENT_NOT_FOUND
    if tenant not in state.tenant_by_number:
        return Status.TENANT_NOT_REGISTERED
    sound = n <= KEYS_MAX and n == len(sizes)
    if names is not None:
        total = int(np.add.reduce(names.lengths))
        sound = sound and n == len(names.lengths) and total == len(names.blob)
    if not options.plain:
        sound = sound and 1 <= options.replicas_min <= options.replicas <= REPLICAS_MAX
        sound = sound and (options.groups is None or len(options.groups) == n)
        if sound and options.groups is not None and (held := state.allowances.get(client)):
            return c.OK if held.takes_groups(state, tenant, options.groups) else c.LIMIT_GROUPS
    return c.OK if sound else c.INVALID_PARAMS


def _all_refused(n: int, status: int) -> tuple[NDArray[Any], NDArray[Any]]:
    answers = np.zeros(n, PUT_ROW)
    answers["status"] = status
    return answers, np.empty(0, REPLICA)


def _claim(
    state: ShardState,
    who: Who,
    words: NDArray[np.int64],
    sizes: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    wish: tuple[int, int],
    status: NDArray[np.int16],
    found: NDArray[np.int32],
) -> None:
    """Give every acceptable key a row in state WRITING, or the status RETRY: clear and ask again.

    `wish` is (replicas wanted, age in ns from which an unfinished put is pre-empted).
    """
    state.table.maintain(len(words))
    state.journal.expect_marks(len(words))
    k.claim(state.words, state.now, *who, *wish, words, sizes, lengths, status, found)


def _stop_hauls(state: ShardState, words: NDArray[np.int64], status: NDArray[np.int16]) -> None:
    """Have objects of these keys leave their hauls; whom a task holds is busy."""
    found = state.table.find(words)
    asked = np.flatnonzero((found >= 0) & (status == Status.OK))
    rows = found[asked]
    busy = (state.flags(rows) & Flag.TASK) != 0
    if busy.any() and len(state.hauls):
        state.hauls.let_go(rows[busy])
        busy = (state.flags(rows) & Flag.TASK) != 0
    status[asked[busy]] = Status.BUSY


def _fill(
    state: ShardState,
    who: Who,
    found: NDArray[np.int32],
    sizes: NDArray[np.int64],
    options: StartOptions,
    status: NDArray[np.int16],
    beside: Beside | None,
) -> None:
    """Find space for the claimed rows that have none, and give up those that get none."""
    if options.replicas > state.replicas_most:
        state.replicas_most = options.replicas
    accepted = np.flatnonzero(status == c.OK)
    accepted = accepted[state.rows["replicas"][found[accepted]] == 0]
    if len(accepted) == 0:
        return
    rows = found[accepted]
    _mark(state, who[1], rows, accepted, options)
    leaving = leaving_bytes(state, beside, who[1], len(found))[:, accepted]
    failed = place(state, who[1], rows, as_column(sizes[accepted], INT64), options, leaving)
    if failed is not None:
        bad = failed != c.OK
        status[accepted[bad]] = failed[bad]
        state.dispose(rows[bad], writer_done=True)


def _answer(
    state: ShardState,
    found: NDArray[np.int32],
    names: Names | None,
    status: NDArray[np.int16],
    answers: NDArray[Any],
    replicas: NDArray[Any],
    beside: Beside | None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keep the names of rows that have space, have these overtake others, and tell of them."""
    if names is not None and state.names.store(found, status, names):
        _refuse_nameless(state, found, names, status)
    settle(state, beside, status)
    return _told(state, found, status, answers, replicas)


def _refuse_nameless(
    state: ShardState, found: NDArray[np.int32], names: Names, status: NDArray[np.int16]
) -> None:
    """Give up new rows whose names found no room: nobody could list them, or remove by name."""
    named = np.flatnonzero((status == c.OK) & (names.lengths > 0))
    lost = named[state.cold["name_ref"][found[named]] == 0]
    status[lost] = c.NO_SPACE
    state.dispose(found[lost], writer_done=True)


def _told(
    state: ShardState,
    found: NDArray[np.int32],
    status: NDArray[np.int16],
    answers: NDArray[Any],
    replicas: NDArray[Any],
) -> tuple[NDArray[Any], NDArray[Any]]:
    m = k.put_reply(state.rows, state.overflow, found, status, answers, replicas)
    return answers, replicas[:m]


def _start_runs(
    state: ShardState,
    who: Who,
    words: NDArray[np.int64],
    sizes: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    answers: NDArray[Any],
    replicas: NDArray[Any],
) -> tuple[int, int, int]:
    """Start the common batch (one replica, nothing special), a run of it per segment.

    Space is allocated before it is known which keys are new: two kernel calls a run, and what
    was not needed goes back. Returns (how many keys from the front were started or refused, their
    replicas, how many are to be cleared away and asked again). The rest is for `_place`, which
    can evict and try other segments.
    """
    if state.tenant_by_number[who[1]].quota_bytes is not None or limits_bytes(state, who[0]):
        return 0, 0, 0
    n, start, placed, retries = len(words), 0, 0, 0
    homes, home = state.space.homes, state.home_of(who[1])
    order, first = homes.turn(state.now, home)
    if first < 0:
        order, first = homes.order(state.now, DEFAULTS, home), 0
    state.table.maintain(n)
    choices = len(order)
    runs = min(choices, max(1, n // SPREAD_RUN))
    for run in range(runs):
        segment, stop = order[(first + run) % choices], n * (run + 1) // runs
        part = words, sizes, lengths
        if runs > 1:
            part = words[start:stop], sizes[start:stop], lengths[start:stop]
        try:
            offsets = segment.allocator.allocate(part[1])
        except ValueError:  # a size is not positive: `claim` refuses only that
            break
        if segment.used > segment.full_at and any(s.used < s.full_at for s in order):
            segment.allocator.free(offsets[offsets >= 0])
            break
        got, left, late = k.start(
            state.words,
            state.now,
            *who,
            segment.index,
            start,
            *part,
            offsets,
            answers[start:] if start else answers,
            replicas[placed:] if placed else replicas,
        )
        if got < 0:
            segment.allocator.free(offsets[offsets >= 0])
            break
        if left:
            segment.allocator.free(offsets[:left])
        start, placed, retries = stop, placed + got, retries + late
    return start, placed, retries


def _mark(
    state: ShardState,
    tenant: int,
    rows: NDArray[np.int32],
    accepted: NDArray[np.int64],
    options: StartOptions,
) -> None:
    """Write what the options say into the columns of new rows."""
    if options.hard_pin:
        state.set_flag(rows, Flag.HARD_PIN)
        state.pinner[rows] = state.cold["owner"][rows]
    if options.soft_pin != SoftPin.PRESERVE:
        state.words[places.PINS_USED] = 1
    if options.soft_pin == SoftPin.DISABLE:
        state.pin_ends[rows] = DISABLE_PIN
    elif options.soft_pin == SoftPin.ENABLE:
        ttl = state.config.soft_pin_ttl_ns
        if options.soft_pin_ttl_ns is not None:
            ttl = min(options.soft_pin_ttl_ns, state.config.soft_pin_ttl_max_ns)
        if ttl > 0:
            state.set_flag(rows, Flag.SOFT_PIN)
        # The time counts from the moment the object is readable.
        state.pin_ends[rows] = ttl if ttl > 0 else DISABLE_PIN
    if options.groups is not None:
        for row, at in zip(rows.tolist(), accepted.tolist(), strict=True):
            if options.groups[at]:
                state.groups.add(row, tenant, options.groups[at])
                state.set_flag(row, Flag.GROUPED)


def put_end(
    state: ShardState,
    client: int,
    digests: NDArray[np.uint64],
    generations: NDArray[np.uint32],
    checksums: NDArray[np.uint64],
    *,
    asked: bool = False,
    tags: NDArray[np.uint64] | None = None,
) -> NDArray[np.int16]:
    """Make written objects readable, with the checksum of their bytes, and a tag if they have one.

    Who is `asked` for rights is not believed to write no more to what was given up earlier.
    """
    n = len(digests)
    tags = checksums[:0] if tags is None else tags
    if n > KEYS_MAX or len(generations) != n or len(checksums) != n or len(tags) not in (0, n):
        return np.full(n, Status.INVALID_PARAMS, np.int16)
    if client not in state.client_by_handle:  # its puts may not have been swept away yet
        return np.full(n, Status.CLIENT_NOT_FOUND, np.int16)
    words = as_words(digests)
    status, done = np.empty(n, np.int16), np.empty(n, np.int32)
    state.expect_notes()
    count, special = k.complete(
        state.words,
        state.now,
        client,
        words,
        as_column(generations, UINT32),
        as_column(checksums, UINT64),
        as_column(tags, INT64),
        status,
        done,
    )
    if special:
        state.become_readable(done[:count])
        for at in np.flatnonzero(status == c.SWAP):
            row = int(state.table.find(words[at : at + 1])[0])
            if int(state.rows["flags"][row]) & c.UPSERT:  # else a repetition within the batch
                _swap_in(state, row)
            status[at] = c.OK
    if state.space.late:
        overtaken = _hear_late(state, client, generations, status, believed=not asked)
        # The put that overtook one of them may be gone from the key again.
        status[overtaken[status[overtaken] == c.NOT_FOUND]] = c.SUPERSEDED
    return status


def _hear_late(
    state: ShardState,
    client: int,
    generations: NDArray[np.uint32],
    status: NDArray[np.int16],
    *,
    believed: bool = True,
) -> NDArray[np.int64]:
    """Return the space of puts that were given up earlier: their writer says that it is done.

    It waits on for one that is not `believed`. Returns the places of those that another put had
    overtaken.
    """
    refused = np.flatnonzero(status)
    if not len(refused):
        return refused
    writers = writers_of(np.full(len(refused), client), generations[refused])
    space = state.space
    return refused[space.writers_done(writers) if believed else space.overtaken(writers)]


def _swap_in(state: ShardState, old: int) -> None:
    """Let the complete second generation of `old` take its place."""
    rows, new = state.rows, int(state.cold["twin"][old]) - 1
    state.cold["twin"][old] = state.cold["twin"][new] = 0
    for row in (old, new):
        state.clear_flag(row, Flag.UPSERT | Flag.DOOMED)
    before, after = int(rows["flags"][old]), int(rows["flags"][new])
    if before & c.HARD_PIN and not after & c.HARD_PIN and keeps_pin(state, old, new):
        state.set_flag(new, Flag.HARD_PIN)
        state.pinner[new] = state.pinner[old]
        state.count_pinned(new, int(rows["size"][new]) * int(rows["replicas"][new]))
    asked = int(state.pin_ends[new])
    if after & c.SOFT_PIN:
        state.pin_ends[new] = asked + state.now
    elif before & c.SOFT_PIN and asked != DISABLE_PIN:
        state.set_flag(new, Flag.SOFT_PIN)
        state.pin_ends[new] = state.pin_ends[old]
        state.cold["pin_level"][new] = state.cold["pin_level"][old]
    else:
        state.pin_ends[new] = 0
    if before & c.GROUPED and not after & c.GROUPED:
        state.groups.add(new, int(state.cold["tenant"][old]), state.groups.name(old))
        state.set_flag(new, Flag.GROUPED)
    state.names.hand_over(old, new)
    rows["state"][new] = c.READABLE
    rows["lease_end"][new] = 0
    state.tally[c.UNFINISHED] -= 1
    state.tally[c.OBJECTS] += 1
    state.tally[c.MISSING] += max(0, int(state.cold["wanted"][new]) - int(rows["replicas"][new]))
    if int(rows["flags"][new]) & c.SOFT_PIN:
        state.tally[c.SOFT_PINNED] += 1
    was, now = np.array([old], np.int32), np.array([new], np.int32)
    state.table.swap(was, now)
    state.dispose(was, silently=True)
    state.become_readable(now)
    state.journal.mark(new)
    state.events.stored(state.rows, state.cold, new)


def continue_alone(state: ShardState, old: int) -> None:
    """Let the unfinished second generation of a lost object go on as an ordinary put."""
    new = int(state.cold["twin"][old]) - 1
    state.cold["twin"][old] = state.cold["twin"][new] = 0
    for row in (old, new):
        state.clear_flag(row, Flag.UPSERT)
    state.names.hand_over(old, new)
    state.table.swap(np.array([old], np.int32), np.array([new], np.int32))
    state.journal.mark(old, new)


def put_revoke(
    state: ShardState,
    client: int,
    digests: NDArray[np.uint64],
    generations: NDArray[np.uint32],
    *,
    late: bool = False,
) -> NDArray[np.int16]:
    """Give up own unfinished puts; their space returns at once, or as that of a `late` writer.

    So does that of own puts that were given up before: theirs has been waiting for this. Who was
    given rights to write may use them until they end, so is always late.
    """
    n = len(digests)
    if n > KEYS_MAX or len(generations) != n:
        return np.full(n, Status.INVALID_PARAMS, np.int16)
    if client not in state.client_by_handle:
        return np.full(n, Status.CLIENT_NOT_FOUND, np.int16)
    found = state.table.find(as_words(digests))
    status, doomed = np.empty(n, np.int16), np.empty(n, np.int32)
    count = k.revoke(
        state.rows, state.cold, found, as_column(generations, UINT32), client, status, doomed
    )
    if state.space.late and not late:
        _hear_late(state, client, generations, status)
    state.dispose(doomed[:count], writer_done=not late)
    return status
