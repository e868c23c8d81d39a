"""The page of a client, for programs that have a port of their own to show it at. O(families)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.metrics.exposition import Page

if TYPE_CHECKING:
    from mooncake_store.client import ClientStats

__all__ = ["client_page"]


def client_page(stats: ClientStats) -> str:
    """Return the families of a client, given what `Client.stats` says."""
    page = Page("client")
    for name in (
        "requests", "keys", "lease_cache_hits", "disk_reads", "failovers", "checksum_failures",
    ):  # fmt: skip
        page.add(f"mooncake_client_{name}_total", getattr(stats, name))
    for direction, moved in (("read", stats.bytes_read), ("written", stats.bytes_written)):
        for transport, nbytes in moved.items():
            page.add("mooncake_client_transferred_bytes_total", nbytes, transport, direction)
    return page.text()
