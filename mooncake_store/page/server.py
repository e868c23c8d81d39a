"""The page of a master on its control port: files, figures as they change, keys and events.

    page = Page(connected)
    reply = await page.answer(request)      # None for what is no path of the page

It is a client of the master like any other. It only reads: changes go to the port's own paths for
them, with the credential of who makes them.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from mooncake_store.errors import InvalidArgumentError, NotFoundError, StoreError
from mooncake_store.page.api import LIVE, OWN
from mooncake_store.page.assets import HEADERS, File, read_files
from mooncake_store.page.objects import Heat, browse, described, digest_of
from mooncake_store.page.sampling import Sampler
from transfer_engine.rpc.http import JSON, HttpReply, HttpRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mooncake_store.client.aio import AsyncClient

__all__ = ["Page"]

WATCHERS_MAX = 16
"""Of the connections of a port, so that watchers leave some to those who poll."""
FIELDS_MAX = 4
_FRESH = {**HEADERS, "Cache-Control": "no-store"}


class Page:
    """Answers what browsers ask; belongs to one event loop."""

    def __init__(self, connected: Callable[[], Awaitable[AsyncClient]]) -> None:
        self._connected = connected
        self._files = read_files("mooncake_store.page", "master", OWN)
        self._sampler = Sampler(connected)
        self._heat = Heat()
        self._sampling: asyncio.Task[None] | None = None
        self._answers = {
            "/page/objects": self._objects,
            "/page/object": self._object,
            "/page/heat": self._hottest,
        }

    def begin(self) -> None:
        """Look at the pool from now on, so that there is a history when somebody comes."""
        if self._sampling is None:
            self._sampling = asyncio.get_running_loop().create_task(self._sampler.run())

    async def close(self) -> None:
        """Look at it no more."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)

    async def answer(self, request: HttpRequest) -> HttpReply | None:
        """Answer a request, or None where it is for somebody else."""
        path, _, query = request.target.partition("?")
        if request.method not in ("GET", "HEAD"):
            return None
        if path in self._files:
            return _sent(self._files[path], request.headers.get("if-none-match", ""))
        if path == "/page/live":
            return self._live()
        if path not in self._answers:
            return None
        try:
            fields = parse_qs(query, keep_blank_values=True, max_num_fields=FIELDS_MAX)
            given = {name: values[0] for name, values in fields.items()}
            return _told(await self._answers[path](await self._connected(), given))
        except (ValueError, InvalidArgumentError) as error:
            return _refused(400, error)
        except StoreError as error:
            return _refused(503, error)

    def _live(self) -> HttpReply:
        if self._sampling is None:
            return _refused(503, "the master has only just begun to start")
        if self._sampler.watchers >= WATCHERS_MAX:
            return _refused(503, f"{WATCHERS_MAX} pages watch already", "close one of them")
        return HttpReply(200, self._sampler.live(), LIVE, _FRESH)

    async def _objects(self, client: AsyncClient, given: dict[str, str]) -> dict[str, Any]:
        return await browse(client, given.get("prefix", ""), given.get("after", ""))

    async def _object(self, client: AsyncClient, given: dict[str, str]) -> dict[str, Any]:
        key = given.get("key", "")
        events = self._sampler.events.of(digest_of(client, key))
        try:
            return {"object": described(await client.stat(key)), "events": events}
        except NotFoundError:
            return {"object": None, "events": events}

    async def _hottest(self, client: AsyncClient, given: dict[str, str]) -> dict[str, Any]:
        return await self._heat.look(client)


def _sent(file: File, known: str) -> HttpReply:
    headers = {**HEADERS, "ETag": f'"{file.etag}"'}
    if f'"{file.etag}"' in known:
        return HttpReply(304, b"", file.kind, headers)
    return HttpReply(200, file.body, f"{file.kind}; charset=utf-8", headers)


def _told(content: Any, status: int = 200) -> HttpReply:
    return HttpReply(status, json.dumps(content, separators=(",", ":")).encode(), JSON, _FRESH)


def _refused(status: int, error: Exception | str, advice: str = "try again soon") -> HttpReply:
    code = getattr(error, "code", -600)
    advice = getattr(error, "advice", None) or advice
    what = getattr(error, "what", None) or str(error)
    return _told({"error": {"code": code, "message": what, "advice": advice}}, status)
