"""Rights that go with answers, and what owners of memory said of their use.

    asking = Asking(namespaces, epoch_ns, bases)
    rights = to_read(shard, asking, rows, replicas)       # of the get just made
    rights = to_write(shard, asking, digests, rows, replicas)
    statuses = put_end(shard, asking, client, digests, generations, checksums, receipts)

Rows are as `get` and `put_start` answered them, places as they are in whole segments: where the
slice of the shard begins in each, `bases` says. Nothing is remembered of a right: what it was made
of the rows still say when its put ends.

Who has to show rights gives back nothing early, so that nobody is given what they still open: of
what such a client has begun space is that of a late writer, whatever it says (`put_end` and
`put_revoke`), and its leases run to their end. O(n + replicas).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.core import puts
from mooncake_store.core.kernels import rights as k
from mooncake_store.core.records import KEYS_MAX, Status
from mooncake_store.core.state import INT64, UINT32, ShardState, as_column, as_words
from transfer_engine.kernels.rights import READ, WRITE, granted, lacking

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DRIFT_TICKS", "Asking", "put_end", "to_read", "to_write", "unwritten"]

DRIFT_TICKS = 4
"""Ends of rights that differ by no more are the same: the shard may have been started again since,
on another host, where its clock is a little further; and clocks are put right all the time."""


class Asking(NamedTuple):
    """Who is given rights, and what about them is the shard's place and time."""

    namespaces: tuple[str, ...]
    """Those that the credential of the session names."""
    epoch_ns: int
    """How far the shard's clock is behind 1970."""
    bases: NDArray[np.int64]
    """Where in each segment the shard's slice begins."""


def to_read(
    state: ShardState, asking: Asking, answers: NDArray[Any], replicas: NDArray[Any]
) -> NDArray[np.int64]:
    """Return tag and stamp for each replica in the answer to a get just made."""
    places, asked = _places(len(replicas)), state.space.guards.asked(asking.namespaces)
    k.to_read(state.now, asking.epoch_ns, asked, answers, replicas, places)
    return _granted(state, places, READ, len(replicas))


def to_write(
    state: ShardState,
    asking: Asking,
    digests: NDArray[np.uint64],
    answers: NDArray[Any],
    replicas: NDArray[Any],
) -> NDArray[np.int64]:
    """Return tag and stamp for each replica that puts of these keys were answered."""
    places, asked = _places(len(replicas)), state.space.guards.asked(asking.namespaces)
    words = as_words(digests)
    k.to_write(state.words, asking.epoch_ns, asked, words, answers, replicas, places)
    return _granted(state, places, WRITE, len(replicas))


def unwritten(
    state: ShardState,
    asking: Asking,
    client: int,
    digests: NDArray[np.uint64],
    generations: NDArray[np.uint32],
    receipts: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Say which of a client's unfinished puts lack the receipt of an owner.

    Receipts come in any order: each is good for one place and one put. Of columns that do not make
    sense nothing is said: `put_end` refuses these.
    """
    out = np.zeros(len(digests), np.bool_)
    _unwritten(state, asking, client, digests, generations, receipts, out)
    return out


def _unwritten(
    state: ShardState,
    asking: Asking,
    client: int,
    digests: NDArray[np.uint64],
    generations: NDArray[np.uint32],
    receipts: NDArray[np.int64],
    out: NDArray[np.bool_],
) -> int:
    n = len(digests)
    if n > KEYS_MAX or len(generations) != n:
        return 0
    most = n * state.replicas_most
    places, whose = _places(most), np.empty(most, np.int64)
    guards, words = state.space.guards, as_words(digests)
    given = guards.asked(asking.namespaces), asking.bases, words, as_column(generations, UINT32)
    count = k.to_show(state.words, client, asking.epoch_ns, *given, places, whose)
    shown = as_column(np.sort(receipts) if len(receipts) > 1 else receipts, INT64)
    found: int = lacking(guards.keys, places, count, DRIFT_TICKS, shown, whose, out)
    return found


def put_end(
    state: ShardState,
    asking: Asking,
    client: int,
    digests: NDArray[np.uint64],
    generations: NDArray[np.uint32],
    checksums: NDArray[np.uint64],
    receipts: NDArray[np.int64],
    tags: NDArray[np.uint64] | None = None,
) -> NDArray[np.int16]:
    """Make objects readable of which the owners of all places say that they were written."""
    refused = np.zeros(len(digests), np.bool_)
    if not _unwritten(state, asking, client, digests, generations, receipts, refused):
        return puts.put_end(state, client, digests, generations, checksums, asked=True, tags=tags)
    statuses, rest = np.full(len(digests), Status.INVALID_WRITE, np.int16), ~refused
    given = digests[rest], generations[rest], checksums[rest]
    if tags is not None and len(tags) == len(rest):  # else it is refused
        tags = tags[rest]
    statuses[rest] = puts.put_end(state, client, *given, asked=True, tags=tags)
    return statuses


def _places(count: int) -> NDArray[np.int64]:
    return np.empty((5, count), np.int64)


def _granted(
    state: ShardState, places: NDArray[np.int64], kind: int, count: int
) -> NDArray[np.int64]:
    out = np.empty((count, 2), np.int64)
    granted(state.space.guards.keys, places, kind, out)
    return out
