"""Rights that go with answers, and what owners of memory said of their use.

    asking = Asking(namespaces, epoch_ns, bases)
    rights = to_read(shard, asking, rows, replicas)       # of the get just made
    rights = to_write(shard, asking, digests, rows, replicas)
    tags = content_tags(shard, digests, rows)             # of the content, by its writers
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

from mooncake_store.core import context as places
from mooncake_store.core.kernels import rights as k
from mooncake_store.core.records import KEYS_MAX
from mooncake_store.core.state import INT64, UINT32, ShardState, as_column, as_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Asking", "content_tags", "to_read", "to_write", "unwritten"]


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
    out, columns = _room(replicas)
    guards = state.space.guards
    asked = guards.asked(asking.namespaces)
    k.to_read(state.now, asking.epoch_ns, guards.keys, asked, answers, replicas, columns, out)
    return out


def to_write(
    state: ShardState,
    asking: Asking,
    digests: NDArray[np.uint64],
    answers: NDArray[Any],
    replicas: NDArray[Any],
) -> NDArray[np.int64]:
    """Return tag and stamp for each replica that puts of these keys were answered."""
    out, columns = _room(replicas)
    guards = state.space.guards
    asked = guards.asked(asking.namespaces)
    k.to_write(
        state.words, asking.epoch_ns, guards.keys, asked, as_words(digests), answers, replicas,
        columns, out,
    )  # fmt: skip
    return out


def content_tags(
    state: ShardState, digests: NDArray[np.uint64], answers: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the tags of content in a get just made, as rows of two words; 0 where there is none."""
    out = np.zeros((len(digests), 2), np.int64)
    if state.numbers[places.TAGS_USED] and len(digests) <= KEYS_MAX:
        k.content_tags(state.words, as_words(digests), answers, out[:, 0])
    return out


def _room(replicas: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.empty((len(replicas), 2), np.int64), np.empty((4, len(replicas)), np.int64)


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
    if len(digests) > KEYS_MAX or len(generations) != len(digests):
        return out
    guards = state.space.guards
    asked = guards.asked(asking.namespaces)
    given = as_column(np.sort(receipts), INT64)
    k.unwritten(
        state.words, client, asking.epoch_ns, guards.keys, asked, asking.bases, as_words(digests),
        as_column(generations, UINT32), given, out,
    )  # fmt: skip
    return out
