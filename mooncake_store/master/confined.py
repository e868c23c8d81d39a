"""What a credential of some namespaces is shown: to it, others' keys are not there.

    confinement = Confinement(shard)
    request = confinement.narrowed(peer, declaration, request)

Keys of objects of other namespaces are exchanged for one that nobody has, so every operation
answers as it does for what does not exist; to begin an object under such a key is refused. Events
and snapshots leave the keys of others out. Whoever may speak for every namespace pays nothing; for
others keys are looked up twice, O(keys).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from mooncake_store.core.records import EventKind
from mooncake_store.master.words import digest_of
from transfer_engine import audit
from transfer_engine.errors import AuthError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from mooncake_store.core.shard import Shard
    from mooncake_store.master.clients import Peer

__all__ = ["Confinement"]


class Confinement:
    """Keeps those of one namespace to it."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._nobody = secrets.token_bytes(16)

    def narrowed(
        self, peer: Peer, request: Any, columns: Iterable[str], begun: str, operation: str
    ) -> Any:
        """Return a request without the keys of others in these columns.

        Raises AuthError where objects are to begin under one, in the column `begun`.
        """
        begins = getattr(request, begun) if begun else None
        if begins is not None and self._shard.foreign(begins, peer.tenant) is not None:
            what = "a key is taken by an object of another namespace"
            audit.refused(peer.who, peer.address, operation, what, "key")
            raise AuthError(
                what,
                operation=operation,
                advice="make keys of this namespace by its own identity",
            )
        nobody = np.frombuffer(self._nobody, np.uint64)
        for column in columns:
            keys = getattr(request, column)
            foreign = self._shard.foreign(keys, peer.tenant)
            if foreign is not None:
                own = keys.copy()
                own[foreign] = nobody
                own.setflags(write=False)
                request = request._replace(**{column: own})
        digest = getattr(request, "digest", None)
        if digest is not None:
            alone = digest_of(digest).reshape(1, 2)
            if self._shard.foreign(alone, peer.tenant) is not None:
                request = msgspec.structs.replace(request, digest=self._nobody)
        return request

    def events(self, peer: Peer, told: NDArray[Any]) -> NDArray[Any]:
        """Return events as this peer sees them: those of others are of no key."""
        others = told["tenant"] != peer.tenant
        if peer.confined and others.any():
            told = told.copy()
            told[others] = (0, 0, EventKind.REMOVED, peer.tenant, 0)
        return told
