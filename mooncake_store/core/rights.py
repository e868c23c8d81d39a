"""Rights that go with answers, and what owners of memory said of their use.

    asking = Asking(namespaces, epoch_ns, bases)
    rights = to_read(shard, asking, rows, replicas)       # of the get just made
    rights = to_write(shard, asking, digests, rows, replicas)
    refused = unwritten(shard, asking, client, digests, generations, receipts)

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

from mooncake_store.core.kernels import rights as k
from mooncake_store.core.records import KEYS_MAX
from mooncake_store.core.state import UINT32, ShardState, as_column, as_words
from transfer_engine.kernels.rights import READ, TICK_MS, WRITE, WRITTEN, granted

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DRIFT_TICKS", "Asking", "to_read", "to_write", "unwritten"]

DRIFT_TICKS = 16
"""Ends of rights that differ by no more are the same: the shard may have been started again since,
on another host, where its clock is a little further."""
_DRIFTS = TICK_MS * np.arange(-DRIFT_TICKS, DRIFT_TICKS + 1)


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
    n = len(digests)
    out = np.zeros(n, np.bool_)
    if n > KEYS_MAX or len(generations) != n:
        return out
    most = n * state.replicas_most
    places, whose = _places(most), np.empty(most, np.int64)
    asked, words = state.space.guards.asked(asking.namespaces), as_words(digests)
    given = words, as_column(generations, UINT32), places, whose
    count = k.to_show(state.words, client, asking.epoch_ns, asked, asking.bases, *given)
    places, shown = places[:, :count], np.sort(receipts)
    lacking = ~_among(shown, _granted(state, places.copy(), WRITTEN, count)[:, 0])
    if lacking.any():
        left = np.flatnonzero(lacking)
        lacking[left] = ~_among_near(state, shown, places[:, left])
    out[whose[:count][lacking]] = True
    return out


def _among_near(
    state: ShardState, receipts: NDArray[np.int64], places: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Say for which places there is a receipt by a right that ended a little earlier or later."""
    near = np.repeat(places, len(_DRIFTS), axis=1)
    near[3] += np.tile(_DRIFTS, places.shape[1])
    tags = _granted(state, near, WRITTEN, near.shape[1])[:, 0]
    found: NDArray[np.bool_] = np.bitwise_or.reduce(
        _among(receipts, tags).reshape(-1, len(_DRIFTS)), axis=1
    )
    return found


def _among(receipts: NDArray[np.int64], tags: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which tags are among receipts, which are sorted."""
    if not len(receipts):
        return np.zeros(len(tags), np.bool_)
    at = np.minimum(np.searchsorted(receipts, tags), len(receipts) - 1)
    found: NDArray[np.bool_] = receipts[at] == tags
    return found


def _places(count: int) -> NDArray[np.int64]:
    return np.empty((5, count), np.int64)


def _granted(
    state: ShardState, places: NDArray[np.int64], kind: int, count: int
) -> NDArray[np.int64]:
    out = np.empty((count, 2), np.int64)
    granted(state.space.guards.keys, places, kind, out)
    return out
