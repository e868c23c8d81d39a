"""What the workers of one principal lend, held against the limits of its credential.

It is counted of what the registers say, so it is the same after a restart and on a standby that
takes over. O(segments) a mount, and nothing where the credential has no limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.master.accounts import refusal

if TYPE_CHECKING:
    from mooncake_store.master.roster import LentWorker, Roster
    from mooncake_store.wire.cluster import Mount
    from transfer_engine.audit import Limited
    from transfer_engine.rpc.serving import Connection

__all__ = ["lend_as"]


def lend_as(asker: Connection, roster: Roster, worker: LentWorker, request: Mount) -> None:
    """Note what a worker is. Raises AuthError where what it lends anew would be too much.

    What it lends already stays: to take it away would lose what lies there.
    """
    rights = asker.session.rights
    worker.name, worker.host, worker.keeps = request.name, request.host, request.keeps
    worker.principal = rights.principal
    new = [spec.nbytes for spec in request.segments if roster.find(spec.uuid) is None]
    if not new or not rights.limits:
        return
    segments = roster.segments.values()
    lent = [s.spec.nbytes for s in segments if s.worker.principal == rights.principal]
    counts: dict[Limited, tuple[int, int]] = {
        "segments": (len(lent), len(new)),
        "lent": (sum(lent), sum(new)),
    }
    for name, (taken, more) in counts.items():
        most = rights.limits.get(name)
        if most is not None and taken + more > most:
            raise refusal(rights.who, name, most, taken, peer=asker.peer, operation="mount")
