"""The control port of the original's master: what orchestrators and dashboards poll.

    with Control("127.0.0.1", 9003) as control:
        control.serve("127.0.0.1:50051")

Paths, statuses and field names are the original's; what is not kept here is left out or 0. It is
a client of the master like any other, in a thread of its own: a slow poll delays no put. Before
`serve` names the master, `/health` says that it is not ready and everything else answers 503. At
`/` there is a page for people (`mooncake_store.page`).

Reading is open to whoever reaches the port, as in the original. Changing (drains, `remove_all`)
is refused with 403 to pages of a browser, as on all such ports, and on an address that others can
reach unless the master is insecure by its settings: the pool may have a secret that such a request
does not prove. What type a body is of is not asked: what programs of the original call theirs is
not ours to choose.

Beside the original's paths it has those of the admin API, which begin with `/v1/`
(`mooncake_store.admin`) and decide for themselves who may ask.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs

from mooncake_store.admin.admission import Admission
from mooncake_store.admin.service import AdminService
from mooncake_store.compat.control_api import CHANGES, FIXED, READS, description
from mooncake_store.compat.drains import DrainRefused, Drains
from mooncake_store.compat.metrics import metrics, summary
from mooncake_store.core.records import SegmentState
from mooncake_store.endpoint import is_loopback
from mooncake_store.errors import (
    InvalidArgumentError,
    NotFoundError,
    StoreError,
    UnavailableError,
)
from mooncake_store.metrics.exposition import KIND
from mooncake_store.metrics.of_master import master_page
from mooncake_store.page.server import Page
from mooncake_store.program.openapi import PATH
from transfer_engine.rpc.http import JSON, TEXT, HttpReply, HttpRequest, HttpServer

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from mooncake_store.client.aio import AsyncClient
    from mooncake_store.client.results import ObjectInfo
    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.wire.cluster import SegmentEntry
    from mooncake_store.wire.shard import ShardFigures
    from transfer_engine.wire.tls import Tls

    Query: TypeAlias = dict[str, str]
    Handler: TypeAlias = Callable[[AsyncClient, Query, bytes], Awaitable[HttpReply]]

__all__ = ["Control"]

HEAD_BYTES_MAX = 64 << 10
"""Keys to look up come in the path."""
BODY_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 64
PATIENCE_S = 10.0
DEADLINE_S = 5.0
LISTED = 4096
FIELDS_MAX = 16

_REFUSALS = {
    -101: (404, "SEGMENT_NOT_FOUND"),
    -600: (400, "INVALID_PARAMS"),
    -704: (404, "OBJECT_NOT_FOUND"),
    -1010: (409, "UNAVAILABLE_IN_CURRENT_STATUS"),
    -1402: (404, "JOB_NOT_FOUND"),
}
# OK, SUSPECT (it may come back), DRAINING, DRAINED, one that is being taken away, and ABSENT, for
# which the original has no state.
_STATES = {
    SegmentState.OK: (1, "OK"),
    SegmentState.SUSPECT: (1, "OK"),
    SegmentState.DRAINING: (2, "DRAINING"),
    SegmentState.DRAINED: (3, "DRAINED"),
    SegmentState.GONE: (5, "UNMOUNTING"),
    SegmentState.ABSENT: (0, "UNDEFINED"),
}

_NO_LEADER = {"leader_address": None, "view_version": None}


def _description() -> HttpReply:
    return _json(description())


def _json(content: Any, status: int = 200) -> HttpReply:
    return HttpReply(status, json.dumps(content, separators=(",", ":")).encode(), JSON)


def _text(content: str, status: int = 200) -> HttpReply:
    return HttpReply(status, content.encode("utf-8", "surrogateescape"), TEXT)


def _refused(number: int, message: str = "", status: int | None = None) -> HttpReply:
    usual, name = _REFUSALS.get(number, (400, "INTERNAL_ERROR"))
    content = {"success": False, "error_code": number, "error_message": message or name}
    return _json(content, status or usual)


class Control(HttpServer):
    """Serves until it is closed; raises ConfigError when the port is taken."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret_file: str = "",
        insecure: bool = False,
        tls: Tls | None = None,
        settings: MasterConfig | None = None,
    ) -> None:
        self._may_change = insecure or is_loopback(host)
        self._secret_file = secret_file
        self._master = ""
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self._drains = Drains()
        self._page = Page(self._connected_client)
        self._admin = AdminService(
            self._connected_client,
            Admission(host, settings, insecure=insecure, sealed=tls is not None),
            settings,
            self.tell_refused,
        )
        self._fixed: dict[str, Callable[[], HttpReply]] = {PATH: _description}
        self._fixed |= {each.path: getattr(self, f"_{each.name}") for each in FIXED}
        self._reads: dict[str, Handler] = {
            each.path: getattr(self, f"_{each.name}") for each in READS
        }
        self._changes: dict[str, Handler] = {
            each.path: getattr(self, f"_{each.name}") for each in CHANGES
        }
        super().__init__(
            host,
            port,
            connections_max=CONNECTIONS_MAX,
            patience_s=PATIENCE_S,
            head_bytes_max=HEAD_BYTES_MAX,
            body_bytes_max=BODY_BYTES_MAX,
            name="mooncake-control",
            insecure=insecure,
            tls=tls,
        )

    def serve(self, master: str) -> None:
        """Answer for this master from now on."""
        self._master = master
        self._loop.call_soon_threadsafe(self._page.begin)

    # -- requests

    async def receive(self, request: HttpRequest, sock: socket.socket) -> HttpReply:
        """Answer a request; the admin API decides for itself who may ask."""
        if self._admin.has(request):
            return await self._admin.answer(request, sock)
        return await super().receive(request, sock)

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answer a request."""
        if (shown := await self._page.answer(request)) is not None:
            return shown
        path, _, query = request.target.partition("?")
        if request.method == "GET" and path in self._fixed:
            return self._fixed[path]()
        changing = request.method == "POST"
        handler = (self._changes if changing else self._reads).get(path)
        if handler is None or request.method not in ("GET", "POST"):
            return _text("404 Not Found", 404)
        if changing and not self._may_change:
            return _refused(-600, "changes are not taken here; start with --insecure", 403)
        try:
            fields = parse_qs(query, keep_blank_values=True, max_num_fields=FIELDS_MAX)
        except ValueError as error:
            return _refused(-600, str(error))
        try:
            client = await self._connected_client()
            given = {name: values[0] for name, values in fields.items()}
            return await handler(client, given, request.body)
        except DrainRefused as error:
            return _refused(error.number)
        except (InvalidArgumentError, NotFoundError) as error:
            return _refused(error.code)
        except StoreError as error:
            return _refused(error.code, str(error), 503)

    async def _connected_client(self) -> AsyncClient:
        async with self._connecting:
            if self._client is None:
                if not self._master:
                    raise UnavailableError("the master has only just begun to start")
                # Kernels may have to be loaded, which no other request has to wait for.
                loop = asyncio.get_running_loop()
                client = await loop.run_in_executor(None, self._new_client)
                self._client = await client.connect()
            return self._client

    def _new_client(self) -> AsyncClient:
        from mooncake_store.client.aio import AsyncClient

        return AsyncClient(
            f"mooncake://{self._master}",
            secret_file=self._secret_file,
            segment=0,
            deadline=DEADLINE_S,
        )

    async def ended(self) -> None:
        """Close the client."""
        await self._page.close()
        await self._admin.close()
        if self._client is not None:
            await self._client.close()

    # -- what needs no store to be asked: this master is always the one that serves

    def _health(self) -> HttpReply:
        life = {"status": "ok", "role": "leader", "ha_state": "serving"}
        return _json({**life, "service_ready": bool(self._master), **_NO_LEADER})

    def _role(self) -> HttpReply:
        return _text("leader")

    def _ha_status(self) -> HttpReply:
        return _text("serving" if self._master else "starting")

    def _leader(self) -> HttpReply:
        return _json({"present": False, **_NO_LEADER})

    # -- figures

    async def _metrics(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        status, counted, figures = await asyncio.gather(
            client.status(), client.store_metrics(), _figures(client)
        )
        told = metrics(figures, status) if figures else ""
        told += master_page(counted, status)
        return HttpReply(200, told.encode("utf-8", "surrogateescape"), KIND)

    async def _summary(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        return _text(summary(await client.store_stats(), await client.status()))

    # -- objects

    async def _query_key(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        info = await client.query(query.get("key", ""))
        return _json({"success": True, "data": _places(info)})

    async def _query_keys(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        given = query.get("keys", "")
        if not given:
            return _json({"success": False, "error": "name keys: ?keys=key1,key2"}, 400)
        keys = given.split(",")
        found = await client.query_many(keys)
        data = {}
        for key, info in zip(keys, found.infos, strict=True):
            there = info is not None
            data[key] = {
                "ok": there,
                "error": None if there else _REFUSALS[-704][1],
                "values": None if info is None else _places(info),
                "disk_values": None,
                "local_disk_values": None if info is None else _disk_places(info) or None,
                "nof_values": None,
            }
        return _json({"success": True, "data": data})

    async def _all_keys(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        objects, after = await client.list_page(limit=LISTED)

        async def pages() -> AsyncGenerator[bytes]:
            page, following = objects, after
            while True:
                if page:
                    yield b"".join(_line(found.key) for found in page)
                if not following:
                    return
                page, following = await client.list_page(limit=LISTED, after=following)

        return HttpReply(200, pages(), TEXT)

    async def _remove_all(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        if query.get("tenant_id", "default") not in ("", "default"):
            return _refused(-600, "other tenants are cleared by a client of theirs")
        count = await client.clear(force=query.get("force") in ("true", "1"))
        return _json({"success": True, "removed_count": count})

    # -- segments

    async def _all_segments(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        status = await client.status()
        return _text("".join(f"{entry.name}\n" for entry in status.segments))

    async def _segments_detail(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        segments = (await client.status()).segments
        return _json(
            {"total_segments": len(segments), "segments": [_detail(entry) for entry in segments]}
        )

    async def _query_segment(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        entry = await self._segment(client, query.get("segment", ""))
        if entry is None:
            return _text("Failed to query segment", 500)  # the original's status, and words
        return _text(
            f"{entry.name}\nUsed(bytes): {entry.used_bytes}\nCapacity(bytes) : {entry.nbytes}\n"
        )

    async def _segment_status(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        name = query.get("segment", "")
        if not name:
            return _refused(-600, "name a segment: ?segment=")
        entry = await self._segment(client, name)
        if entry is None:
            return _refused(-101)
        number, word = _STATES[SegmentState(entry.state)]
        return _json(
            {"success": True, "segment": name, "status": number, "status_name": word,
             "error_code": 0, "error_message": ""}
        )  # fmt: skip

    async def _segment(self, client: AsyncClient, name: str) -> SegmentEntry | None:
        segments = (await client.status()).segments
        return next((entry for entry in segments if entry.name == name), None)

    # -- drains

    async def _drain(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        job = await self._drains.start(client, body)
        return _json(_job_answer(job, "CREATED"))

    async def _drain_status(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        return _json(await self._drains.status(client, query.get("job_id", "")))

    async def _cancel_drain(self, client: AsyncClient, query: Query, body: bytes) -> HttpReply:
        job = await self._drains.cancel(client, query.get("job_id", ""))
        return _json(_job_answer(job, "CANCELED"))


async def _figures(client: AsyncClient) -> list[ShardFigures]:
    """Totals of all shards; none where one of them is away, as dashboards would take the rest."""
    try:
        return await client.store_stats()
    except StoreError:
        return []


def _job_answer(job: str, status: str) -> dict[str, Any]:
    return {"success": True, "job_id": job, "status": status, "error_code": 0, "error_message": ""}


def _line(key: str | bytes) -> bytes:
    return (key.encode() if isinstance(key, str) else key) + b"\n"


def _places(info: ObjectInfo) -> list[dict[str, Any]]:
    """Replicas in memory as the original describes them; an address is the offset there."""
    return [
        {"size_": info.size, "buffer_address_": replica.offset, "protocol_": "tcp",
         "transport_endpoint_": replica.segment}
        for replica in info.replicas
        if not replica.below
    ]  # fmt: skip


def _disk_places(info: ObjectInfo) -> list[dict[str, Any]]:
    """Replicas below memory; no client has a number that others would know it by."""
    return [
        {"client_id": "", "object_size": info.size, "transport_endpoint": replica.segment}
        for replica in info.replicas
        if replica.below
    ]


def _detail(entry: SegmentEntry) -> dict[str, Any]:
    high, low = (int.from_bytes(entry.uuid[at : at + 8]) for at in (0, 8))
    return {
        "segment_name": entry.name,
        "segment_id": f"{high}-{low}",
        "client_id": entry.worker,
        "base_address": "0x0",  # no address of another process leaves it
        "size_bytes": entry.nbytes,
        "size_human": f"{entry.nbytes / (1 << 30):g} GiB",
        "te_endpoint": entry.name,
        "protocol": "tcp",
        "status": _STATES[SegmentState(entry.state)][1],
        "allocator_used_bytes": entry.used_bytes,
        "allocator_capacity_bytes": entry.nbytes,
        "allocator_usage_percent": 100 * entry.used_bytes / entry.nbytes if entry.nbytes else 0.0,
    }
