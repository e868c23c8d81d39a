"""Renaming as steps: objects get other keys within the master, and no byte moves.

Keys of one pair may belong to different shards. There a rename would be a change in two places,
with a crash between them; such pairs are refused with NOT_RENAMED, and whoever wants to goes on by
copying. Pairs of one shard take effect in order, those of several shards in any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mooncake_store import ids
from mooncake_store.client._arguments import flag_of
from mooncake_store.client._failures import NOT_RENAMED
from mooncake_store.client._keys import KeyBatch
from mooncake_store.client._steps import Steps, ask
from mooncake_store.client.results import BatchResult
from mooncake_store.core.records import RENAMES_MAX
from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.wire.shard import RENAME, RemoveFlag

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from mooncake_store.client._keys import Keys
    from mooncake_store.client._operations import Operations

__all__ = ["rename_many"]


def rename_many(
    operations: Operations,
    keys: Keys,
    targets: Keys,
    overwrite: bool,
    force: bool,
    until: float,
) -> Steps[BatchResult]:
    """Rename a batch; a status per pair."""
    core = operations.core
    old, new = KeyBatch.of(keys, core.seed), KeyBatch.of(targets, core.seed)
    if len(old) != len(new):
        raise InvalidArgumentError(f"{len(old)} keys and {len(new)} new ones")
    core.counters.keys += len(old)
    statuses = np.minimum(old.statuses(), new.statuses())
    errors: dict[int, StoreError | str] = {}
    shards = ids.shard_of(old.digests, core.shards) if core.shards > 1 else np.zeros(len(old))
    if core.shards > 1:
        elsewhere = (ids.shard_of(new.digests, core.shards) != shards) & (statuses == 0)
        statuses[elsewhere] = NOT_RENAMED
    calls: list[tuple[int, Any, bytes]] = []
    positions: list[NDArray[np.int64] | None] = []
    for shard in range(core.shards):
        mine = np.flatnonzero((shards == shard) & (statuses == 0))
        for first in range(0, len(mine), RENAMES_MAX):
            some = mine[first : first + RENAMES_MAX]
            for batch in (old, new):
                release = operations.give_back(batch, some)
                if release is not None:
                    calls.append((shard, *release))
                    positions.append(None)
            shown = (core.leases.viewed(batch.words[some]) for batch in (old, new))
            flags = RemoveFlag.FORCE if flag_of(force, "force") else 0
            if all(viewed is None for viewed in shown):
                flags |= RemoveFlag.OWN_LEASES
            body = RENAME.request.pack(
                overwrite=flag_of(overwrite, "overwrite"),
                flags=flags,
                sources=old.digests[some],
                targets=new.digests[some],
                names=new.names(some),
            )
            calls.append((shard, RENAME, body))
            positions.append(some)
    replies = (yield from ask(calls, until)) if calls else []
    for position, reply in zip(positions, replies, strict=True):
        if position is None:
            continue
        if isinstance(reply, StoreError):
            statuses[position] = reply.code
            errors.update(dict.fromkeys(position.tolist(), reply))
        else:
            statuses[position] = reply.statuses
    return BatchResult("rename", old, statuses, errors)
