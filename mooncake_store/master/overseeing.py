"""What a shard tells whoever looks after a pool: all namespaces, all copies that were asked for."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from mooncake_store.master.answers import Answer, answers
from mooncake_store.master.bounds import check_label
from mooncake_store.master.shard_link import slice_of
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire import overseeing as wire
from transfer_engine.errors import InvalidArgumentError, OverloadedError

if TYPE_CHECKING:
    from mooncake_store.core.tasks import Task
    from mooncake_store.master.clients import Peer
    from mooncake_store.master.site import Site

__all__ = ["Overseeing"]

TASKS_MAX = 256
NAMESPACES_MAX = 2048
"""In one answer, where they fit with the longest names, as the tasks do."""


class Overseeing:
    """Answers what is asked of all that is here, whosever it is."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._shard = site.shard

    @answers(wire.TASKS, dear=True)
    def tasks(self, peer: Peer, request: wire.TasksRequest) -> Answer:
        """Return the latest copies and moves that clients asked for."""
        limit = max(0, min(request.limit, TASKS_MAX))
        latest = self._shard.tasks.latest_asked(limit)
        return wire.TaskEntries(tuple(map(self._entry, latest)))

    def _entry(self, task: Task) -> wire.TaskEntry:
        now = self._site.now()
        found = self._shard.stat(now, task.digest)
        return wire.TaskEntry(
            task.number,
            int(task.kind),
            int(task.state),
            task.message,
            max(0, now - task.created_ns) // MILLISECOND_NS,
            b"" if found is None else found.name,
            self._shard.tenant_by_number[task.tenant].name,
            task.source,
            task.targets,
        )

    @answers(wire.NAMESPACES, dear=True)
    def namespaces(self, peer: Peer, request: wire.NamespacesRequest) -> Answer:
        """Return what namespaces have, some thousand of them."""
        shard = self._shard
        later = sorted(each for each in shard.tenant_by_number if each > request.after)
        found = [shard.tenant_by_number[number] for number in islice(later, NAMESPACES_MAX)]
        return wire.Namespaces(
            tuple(
                wire.NamespaceFigures(
                    each.number,
                    each.name,
                    shard.tenant_objects(each.number),
                    shard.tenant_bytes(each.number),
                    -1 if each.quota_bytes is None else each.quota_bytes,
                )
                for each in found
            ),
            len(later) > len(found),
        )

    @answers(wire.SET_QUOTA, changes=True)
    def set_quota(self, peer: Peer, request: wire.SetQuota) -> Answer:
        """Give a namespace this shard's part of a quota, or take it away."""
        check_label("namespace", request.namespace)
        if request.quota_bytes < 0:
            self._shard.end_quota(request.namespace)
            return wire.QuotaSet(-1)
        place = self._site.place
        part = slice_of(request.quota_bytes, place.shard, place.shards)[1]
        if not request.namespace or not part:
            raise InvalidArgumentError(
                f"namespace {request.namespace!r} cannot have a quota of {request.quota_bytes} "
                f"bytes: each of {place.shards} shards takes a part",
                operation="set_quota",
                advice="name a namespace, and more bytes",
            )
        if self._shard.tenant(request.namespace, part) < 0:
            raise OverloadedError(
                "there are as many namespaces as a shard knows",
                operation="set_quota",
                advice="use those that there are",
            )
        return wire.QuotaSet(part)
