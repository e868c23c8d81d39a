"""Kernels that know whose a lease is: grants, renewals, releases, and what is leased in all.

A lease belongs to clients. A row's `lease_end` is when the last of them ends. What else is known
of it counts only until then:

- `holder` is the one client that has it, and `holders` how often it was granted;
- or `holder` is 0 and `holders` is SEVERAL: each client has an entry in `shared`;
- or `holders` is HOLDERS_MAX: too many to be counted, and it runs to its end.

`shared` is sets of WAYS entries: a line of words generation << 32 | client << 16 | times granted,
then a line of the ends. All entries of an object are in the set of its generation; an entry whose
end has passed is none. Where a set is full the lease of the object is not counted any more.

So nobody can end what is not his: giving back more often than was granted, or what somebody else
was granted, changes nothing. All kernels are O(n + replicas).

Long leases, those of more than BRIEF_NS, are for a share of the bytes. What has been granted is
added up at once, in LONG and by client in `LONG_OF`; what ended, was given back or removed, a sweep
over the rows finds. So these totals are never too low. `LONG_OF` has three words for each client:
its bytes; those granted on rows that the sweep which runs had passed; those that this has found.
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import (
    HARD_PIN,
    HOLDERS_MAX,
    KERNEL,
    LEASE_EXPIRED,
    NOT_FOUND,
    OK,
    READABLE,
)
from mooncake_store.core.context import (
    BRIEF_NS,
    INT64,
    LONG,
    LONG_BEHIND,
    LONG_MOST,
    LONG_MOST_OF_ONE,
    LONG_OF,
    PINNED_OF,
    PINNER,
    SWEPT,
    UINT16,
    UNSHARED,
)
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.table import is_living

WAYS = 8
SET_WORDS = 2 * WAYS
SETS = 1 << 15
"""4 MiB for 262,144 holders of what several clients lease; memory only where there are any."""
SEVERAL = 0
_TIMES_MAX = 0xFFFF
_CLIENT = 0xFFFF


@njit(**KERNEL)
def granted(context, rows, row, client, now, ttl):
    """How long a lease is that a client gets who asks for a long one: BRIEF_NS without a share.

    A row takes its share when it comes under a long lease, by whoever has that first. O(1).
    """
    brief = context[BRIEF_NS]
    nbytes = np.int64(0)
    if rows[row].lease_end <= now + brief and not rows[row].flags & context[UNSHARED]:
        nbytes = np.int64(rows[row].size * rows[row].replicas)
    of = column(context, LONG_OF, INT64)
    if context[LONG] + nbytes > context[LONG_MOST]:
        return brief
    if of[3 * client] + nbytes > context[LONG_MOST_OF_ONE]:
        return brief
    context[LONG] += nbytes
    of[3 * client] += nbytes
    if row < context[SWEPT]:
        context[LONG_BEHIND] += nbytes
        of[3 * client + 1] += nbytes
    return ttl


@njit(**KERNEL)
def _enter(shared, generation, client, times, further, now, end):
    """Enter a holder `times`, or `further` times if it has an entry. Returns when its lease ends.

    0: the set is full. O(WAYS).
    """
    first = (generation & (SETS - 1)) * SET_WORDS
    wanted = (generation << 16) | client
    free = -1
    for at in range(first, first + WAYS):
        if shared[at + WAYS] <= now:
            free = at
        elif shared[at] >> 16 == wanted:
            shared[at] = (wanted << 16) | min((shared[at] & _TIMES_MAX) + further, _TIMES_MAX)
            shared[at + WAYS] = max(shared[at + WAYS], end)
            return shared[at + WAYS]
    if free < 0:
        return np.int64(0)
    shared[free] = (wanted << 16) | times
    shared[free + WAYS] = end
    return shared[free + WAYS]


@njit(**KERNEL)
def _leave(shared, generation, client, now):
    """Give one grant of a client back. Returns when the lease of those that remain ends. O(WAYS).

    -1: the client has none to give back.
    """
    first = (generation & (SETS - 1)) * SET_WORDS
    wanted = (generation << 16) | client
    found = False
    latest = np.int64(0)
    for at in range(first, first + WAYS):
        if shared[at + WAYS] <= now or shared[at] >> 32 != generation:
            continue
        if shared[at] >> 16 == wanted:
            found = True
            times = shared[at] & _TIMES_MAX
            if times < _TIMES_MAX:
                shared[at] -= 1
            if times == 1:
                shared[at + WAYS] = 0
                continue
        latest = max(latest, shared[at + WAYS])
    return latest if found else np.int64(-1)


@njit(**KERNEL)
def _share(rows, shared, row, client, further, now, end):
    """Grant a lease that runs already to another client. Returns when that one's ends. O(WAYS).

    `further`: how often more it has the lease then if it has it already.
    """
    generation = np.int64(rows[row].generation)
    if rows[row].holder != 0:
        times, first = np.int64(rows[row].holders), np.int64(rows[row].holder)
        rows[row].holder = 0
        rows[row].holders = HOLDERS_MAX
        if times != HOLDERS_MAX and _enter(
            shared, generation, first, times, times, now, rows[row].lease_end
        ):
            rows[row].holders = SEVERAL
    own = np.int64(0)
    if client != 0 and rows[row].holders == SEVERAL:
        own = _enter(shared, generation, client, 1, further, now, end)
    if own == 0:
        rows[row].holders = HOLDERS_MAX  # from now on its end does not move forward any more
        own = max(rows[row].lease_end, end)
    rows[row].lease_end = max(rows[row].lease_end, end)
    return own


@njit(**KERNEL, inline="always")
def lease(rows, shared, row, client, further, now, ttl):
    """Grant a client a lease. Returns when what it has ends. O(WAYS).

    `further`: how often more it has the lease then if it has it already. Client 0 is nobody, who
    gives nothing back.
    """
    own = now + ttl
    if rows[row].lease_end <= now:
        rows[row].lease_end = own
        rows[row].holder = client
        rows[row].holders = 1 if client != 0 else HOLDERS_MAX
    elif client != 0 and rows[row].holder == client:
        if rows[row].holders < HOLDERS_MAX:
            rows[row].holders += further
        own = max(own, rows[row].lease_end)
        rows[row].lease_end = own
    else:
        own = _share(rows, shared, row, client, further, now, own)
    return own


@njit(**KERNEL, inline="always")
def grant(context, rows, shared, row, client, further, now, ttl):
    """Lease a row to a client that asks for `ttl`, see `lease`. O(WAYS).

    Returns how long this lease is, and when what the client has ends.
    """
    if ttl > context[BRIEF_NS]:
        ttl = granted(context, rows, row, client, now, ttl)
    return ttl, lease(rows, shared, row, client, further, now, ttl)


@njit(**KERNEL)
def _others_share(rows, shared, row, client, now):
    """Whether any other client has an entry for the object of a row. O(WAYS)."""
    generation = np.int64(rows[row].generation)
    first = (generation & (SETS - 1)) * SET_WORDS
    for at in range(first, first + WAYS):
        ours = (shared[at] >> 16) & _CLIENT == client
        if shared[at + WAYS] > now and shared[at] >> 32 == generation and not ours:
            return True
    return False


@njit(**KERNEL, inline="always")
def leased_to_others(rows, shared, row, client, now):
    """Whether a lease of anybody but this client runs; client 0 is nobody. O(WAYS)."""
    if rows[row].lease_end <= now:
        return False
    if client == 0 or rows[row].holder != 0:
        return client == 0 or rows[row].holder != client
    return rows[row].holders != SEVERAL or _others_share(rows, shared, row, client, now)


@njit(**KERNEL)
def is_leased_to_others(rows, shared, row, client, now):
    """Whether a lease of anybody but this client runs, for Python that asks of one row."""
    return leased_to_others(rows, shared, row, client, now)


@njit(**KERNEL)
def renew(
    context,
    rows,
    overflow,
    alive,
    shared,
    found,
    generations,
    asked,
    lease_until,
    status,
    remaining,
):
    """Prolong a client's leases of unchanged objects; asked = (client, now, ttl_ns).

    Who has none is granted one. With a ttl of 0 nothing changes but the answers.
    """
    client, now, ttl = asked[0], asked[1], asked[2]
    for i in range(found.shape[0]):
        row = found[i]
        remaining[i] = 0
        status[i] = LEASE_EXPIRED
        if row < 0 or rows[row].state != READABLE or rows[row].generation != generations[i]:
            continue
        if not is_living(rows, overflow, alive, row):
            continue
        status[i] = OK
        if ttl == 0:
            continue
        _, own = grant(context, rows, shared, row, client, 0, now, ttl)
        remaining[i] = own - now
        end = rows[row].lease_end
        lease_until[rows[row].segment] = max(lease_until[rows[row].segment], end)
        link = rows[row].more
        while link >= 0:
            segment = overflow[link].segment
            lease_until[segment] = max(lease_until[segment], end)
            link = overflow[link].next


@njit(**KERNEL)
def release(rows, shared, found, generations, client, now, status):
    """Give leases of one client back, one grant each; a lease ends with the last of them."""
    for i in range(found.shape[0]):
        row = found[i]
        status[i] = NOT_FOUND
        if row < 0 or rows[row].state != READABLE or rows[row].generation != generations[i]:
            continue
        status[i] = OK
        if rows[row].lease_end <= now or rows[row].holders == HOLDERS_MAX or client == 0:
            continue
        if rows[row].holder == client:
            rows[row].holders -= 1
            if rows[row].holders == 0:
                rows[row].lease_end = now
        elif rows[row].holder == 0:
            left = _leave(shared, np.int64(rows[row].generation), client, now)
            if left >= 0:
                rows[row].lease_end = max(left, now)


@njit(**KERNEL)
def survey(context, rows, shared, closed, span, leased, ends):
    """Add up what is leased in rows span[0]..span[1] at the time span[2], by client.

    `ends`: when the last one ends. The third words of LONG_OF add up what is under long leases.

    What several clients have, or clients that are closed, is added to nobody's, leased[0]. What a
    closed client has is nobody's from now on, hard pins included: its number may be given to
    another one.
    """
    now = span[2]
    of = column(context, LONG_OF, INT64)
    pinner, pinned_of = column(context, PINNER, UINT16), column(context, PINNED_OF, INT64)
    for row in range(span[0], span[1]):
        if rows[row].state != 0 and rows[row].flags & HARD_PIN and closed[pinner[row]] != 0:
            pinned = rows[row].size * rows[row].replicas
            pinned_of[np.int64(pinner[row])] -= pinned
            pinner[row] = 0
            pinned_of[0] += pinned
        if rows[row].state != READABLE or rows[row].lease_end <= now:
            continue
        generation = np.int64(rows[row].generation)
        if rows[row].holder != 0 and closed[rows[row].holder] != 0:
            rows[row].holder = 0
            entered = _enter(shared, generation, 0, 1, 0, now, rows[row].lease_end)
            rows[row].holders = SEVERAL if entered else HOLDERS_MAX
        if rows[row].holder == 0 and rows[row].holders == SEVERAL:
            first = (generation & (SETS - 1)) * SET_WORDS
            for at in range(first, first + WAYS):
                if shared[at] >> 32 == generation and closed[(shared[at] >> 16) & _CLIENT] != 0:
                    shared[at] &= ~(_CLIENT << 16)
        holder, nbytes = rows[row].holder, rows[row].size * rows[row].replicas
        leased[holder] += nbytes
        ends[holder] = max(ends[holder], rows[row].lease_end)
        long = rows[row].lease_end > now + context[BRIEF_NS]
        if long and not rows[row].flags & context[UNSHARED]:
            of[3 * holder + 2] += nbytes
