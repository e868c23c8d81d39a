"""Objects on a page: those whose keys begin with a text, all that is known of one, the most read.

Nothing in a shard orders objects by how they are read, so `Heat` looks at a sample: names are gone
through a page at a time, while somebody wants to know, and each object is asked how often it was
read in its last window of ten seconds. Those with the most reads are watched, told once that number
changes, and watched no more when it has not changed for longer than a window. A look costs at most
`SAMPLED + WATCHED` small requests, at most one look a second is made, and it says how many objects
it has seen. O(1) a look.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mooncake_store.client.extension import KeyBatch
from mooncake_store.errors import NotFoundError

if TYPE_CHECKING:
    from mooncake_store.client.aio import AsyncClient
    from mooncake_store.client.results import ListedObject, ObjectStat

__all__ = ["Heat", "browse", "described", "digest_of"]

LISTED = 50
PAGES_MAX = 64
"""Pages of a listing that are looked through for one of the page: each is bounded by itself."""
SAMPLED = 64
WATCHED = 64
COLD_MAX = 4096
SHOWN = 20
WINDOW_S = 12.0
"""Longer than the window in which a shard counts reads."""
_BORDER = re.compile(r"[/:@|]")
_HEAD = 12
"""Characters of a name without a border that stand for its beginning."""


def text_of(key: str | bytes) -> str:
    """Return a key as text."""
    return key if isinstance(key, str) else key.decode(errors="backslashreplace")


async def browse(client: AsyncClient, prefix: str, after: str) -> dict[str, Any]:
    """Return a page of the objects whose names begin with `prefix`, and where it goes on."""
    objects: list[ListedObject] = []
    for _ in range(PAGES_MAX):
        limit = LISTED - len(objects)
        found, after = await client.list_page(prefix, after=after, limit=limit)
        objects += found
        if not after or len(objects) == LISTED:
            break
    return {
        "objects": [
            {
                "key": text_of(each.key),
                "plain": isinstance(each.key, str),
                "size": each.size,
                "created_s": each.created_s,
                "replicas": each.replicas,
            }
            for each in objects
        ],
        "after": after,
    }


def digest_of(client: AsyncClient, key: str) -> bytes:
    """Return what the store knows a key by."""
    return KeyBatch.single(key, client._core.identity).digests.tobytes()


def described(found: ObjectStat) -> dict[str, Any]:
    """Return all that is known of an object."""
    return {
        "key": text_of(found.key),
        "size": found.size,
        "state": found.state,
        "generation": found.generation,
        "checksum": f"{found.checksum:016x}",
        "lease_s": found.lease_s,
        "soft_pin_s": found.soft_pin_s,
        "hard_pin": found.hard_pin,
        "group": found.group,
        "age_s": found.age_s,
        "reads": found.hits,
        "replicas": [
            {
                "segment": each.segment,
                "host": each.host,
                "tier": each.tier or "memory",
                "offset": each.offset,
            }
            for each in found.replicas
        ],
    }


@dataclass(slots=True)
class _Watched:
    key: str
    size: int
    reads: int
    changed: float
    read: bool
    """Whether it was read while it was watched: what was read long ago has a number, too."""


class Heat:
    """Which objects are read most, of those that were looked at; belongs to one event loop."""

    def __init__(self) -> None:
        self._after = ""
        self._seen = 0
        self._rounds = 0
        self._watched: dict[str, _Watched] = {}
        self._cold: OrderedDict[str, int] = OrderedDict()
        """Reads of those that were watched for nothing."""
        self._looked = -1.0
        self._looking = asyncio.Lock()

    async def look(self, client: AsyncClient) -> dict[str, Any]:
        """Look at some more of them; who comes within a second of another shares that look."""
        async with self._looking:
            if time.monotonic() - self._looked >= 1:
                await self._look(client)
                self._looked = time.monotonic()
        read = [each for each in self._watched.values() if each.read]
        found = sorted(read, key=lambda each: -each.reads)
        prefixes: dict[str, list[int]] = {}
        for each in found:
            sums = prefixes.setdefault(_beginning(each.key), [0, 0])
            sums[0] += each.reads
            sums[1] += 1
        ranked = sorted(prefixes.items(), key=lambda each: -each[1][0])
        return {
            "objects": [
                {"key": each.key, "size": each.size, "reads": each.reads} for each in found[:SHOWN]
            ],
            "prefixes": [
                {"prefix": prefix, "reads": reads, "objects": count}
                for prefix, (reads, count) in ranked[:SHOWN]
            ],
            "seen": self._seen,
            "rounds": self._rounds,
        }

    async def _look(self, client: AsyncClient) -> None:
        page, self._after = await client.list_page(after=self._after, limit=SAMPLED)
        self._seen += len(page)
        self._rounds += not self._after
        keys = {text_of(each.key): each.key for each in page}
        keys |= {key: key for key in self._watched}
        stats = await asyncio.gather(*(_stat(client, key) for key in keys.values()))
        now = time.monotonic()
        for name, found in zip(keys, stats, strict=True):
            known = self._watched.get(name)
            if found is None or not found.hits:
                self._watched.pop(name, None)
            elif known is None:
                if self._cold.get(name) != found.hits:
                    self._watched[name] = _Watched(name, found.size, found.hits, now, False)
            elif known.reads != found.hits:
                self._watched[name] = _Watched(name, found.size, found.hits, now, True)
            elif now - known.changed > WINDOW_S:
                self._cold[name] = known.reads
                del self._watched[name]
        while len(self._cold) > COLD_MAX:
            self._cold.popitem(last=False)
        hottest = sorted(self._watched.values(), key=lambda each: -each.reads)[:WATCHED]
        self._watched = {each.key: each for each in hottest}


async def _stat(client: AsyncClient, key: str | bytes) -> ObjectStat | None:
    try:
        return await client.stat(key)
    except NotFoundError:
        return None


def _beginning(key: str) -> str:
    """Return the part of a name that others may share: up to its last border, or a few signs."""
    borders = [each.end() for each in _BORDER.finditer(key)]
    return key[: borders[-1]] if borders else key[:_HEAD]
