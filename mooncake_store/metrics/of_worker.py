"""The page of a worker: what it lends, who uses it, and what it carries. O(segments + connections).

What moves bytes past its owner is not counted here: over shared memory and RDMA they do not pass
this process. Clients count those by transport (`client_page`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mooncake_store.core.records import TIER_NAMES
from mooncake_store.metrics.exposition import Page
from mooncake_store.metrics.families import FAMILIES
from mooncake_store.metrics.process import add_process
from mooncake_store.worker.segments import tier_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.worker.hauler import Hauled
    from mooncake_store.worker.segments import WorkerSegments
    from transfer_engine.transports.server import TransferServer

__all__ = ["worker_page"]


def worker_page(
    lent: WorkerSegments,
    server: TransferServer | None,
    hauled: Iterable[Hauled],
    *,
    mounted: bool,
    sound: bool,
) -> str:
    """Return the families of a worker, and of its process."""
    page = Page("worker", "process")
    page.add("mooncake_worker_mounted", int(mounted))
    page.add("mooncake_worker_sound", int(sound))
    segments, nbytes = Counter[str](), Counter[str]()
    for segment in lent.segments:
        tier = TIER_NAMES[tier_of(segment)]
        segments[tier] += 1
        nbytes[tier] += segment.size
    for tier in TIER_NAMES:
        page.add("mooncake_worker_segments", segments[tier], tier)
        page.add("mooncake_worker_lent_bytes", nbytes[tier], tier)
    page.add("mooncake_worker_failing_segments", len(lent.faults()))
    if server is not None:
        _add_served(page, server)
    each = list(hauled)
    carried, failed = (sum(getattr(one, name) for one in each) for name in ("objects", "failed"))
    page.add("mooncake_worker_hauled_objects_total", carried, "carried")
    page.add("mooncake_worker_hauled_objects_total", failed, "failed")
    page.add("mooncake_worker_hauled_bytes_total", sum(one.nbytes for one in each))
    add_process(page)
    return page.text()


def _add_served(page: Page, server: TransferServer) -> None:
    for transport, count in server.connections.items():
        page.add("mooncake_worker_connections", count, transport)
    carried, turned_away = server.carried, server.turned_away
    page.add("mooncake_worker_requests_total", carried.answered)
    page.add("mooncake_worker_refused_ranges_total", carried.refused)
    page.add("mooncake_worker_transferred_bytes_total", carried.sent, "tcp", "read")
    page.add("mooncake_worker_transferred_bytes_total", carried.received, "tcp", "written")
    for reason in FAMILIES["mooncake_worker_turned_away_total"].labels["reason"]:
        page.add("mooncake_worker_turned_away_total", turned_away[reason], reason)
