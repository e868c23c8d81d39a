"""What a shard does for sessions that have to show rights to the owners of memory (`core.rights`).

    replicas = granting.to_read(peer, digests, rows, replicas)  # with the rights, and the tags
    statuses = granting.put_end(peer, digests, generations, checksums, receipts, tags)

Besides, what they put has a tag of its content, which they alone make and compare, and which their
gets are told (`core.tags`).

Nobody else comes here. Dates are by this host's clock as it is now, which owners follow: one that
was wrong when the shard was started, and is put right, costs no more than the puts under way then,
which have to begin anew. O(n + replicas).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.rights import Asking
from mooncake_store.master.words import words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.master.clients import Peer
    from mooncake_store.master.site import Site

__all__ = ["Granting"]


class Granting:
    """Makes rights, and hears of their use."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._shard = site.shard

    def _asking(self, peer: Peer) -> Asking:
        clock = self._site.clock
        return Asking(peer.namespaces, clock.wall_ns() - clock.now_ns(), self._site.bases)

    def to_read(
        self,
        peer: Peer,
        digests: NDArray[np.uint64],
        rows: NDArray[Any],
        replicas: NDArray[Any],
    ) -> NDArray[np.uint64]:
        """Return what a get just made was answered, in whole segments, and the rights to it.

        Behind these is a row for each key: the tag of its content, or 0.
        """
        now, shard = self._site.now(), self._shard
        rights = shard.rights_to_read(now, self._asking(peer), rows, replicas)
        return _together(replicas, rights, shard.tell_tags(now, digests, rows))

    def to_write(
        self,
        peer: Peer,
        digests: NDArray[np.uint64],
        rows: NDArray[Any],
        replicas: NDArray[Any],
    ) -> NDArray[np.uint64]:
        """Return what puts of these keys were answered, in whole segments, and the rights to it."""
        rights = self._shard.rights_to_write(
            self._site.now(), self._asking(peer), digests, rows, replicas
        )
        return _together(replicas, rights)

    def put_end(
        self,
        peer: Peer,
        digests: NDArray[np.uint64],
        generations: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
        receipts: NDArray[np.int64],
        tags: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.int16]:
        """Make objects readable of which the owners of all places say that they were written."""
        given = peer.handle, digests, generations, checksums, receipts, tags
        return self._shard.put_end_shown(self._site.now(), self._asking(peer), *given)


def _together(replicas: NDArray[Any], *more: NDArray[np.int64]) -> NDArray[np.uint64]:
    return np.concatenate([words(replicas), *(rows.view(np.uint64) for rows in more)])
