"""The admin API of a master: answers what `api` describes, for a server of HTTP.

    service = AdminService(client_of, admission, settings, tell_refused)
    if service.has(request):
        reply = await service.answer(request, sock)

It asks the master as a client does and keeps nothing of what it is told, but for a split that it
has begun: a master that is started anew with other shards cannot tell of the one before. What only
admins may ask is decided by `admission`, and each change is a line of the audit, under the name of
who asked. Belongs to the event loop of its server.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs

import msgspec

from mooncake_store import __version__, credentials
from mooncake_store.admin import api
from mooncake_store.admin.admission import Refused
from mooncake_store.admin.jobs import (
    Job,
    begin_copy,
    begin_drain,
    cancel_job,
    find_job,
    list_jobs,
)
from mooncake_store.admin.pool import events_after, list_namespaces, set_quota
from mooncake_store.admin.told import (
    credential_value,
    problems,
    segments_value,
    standbys_value,
    status_value,
    workers_value,
)
from mooncake_store.client.extension import CLUSTER, ask_one
from mooncake_store.config import settings_of
from mooncake_store.errors import (
    AlreadyExistsError,
    AuthError,
    BusyError,
    HasLeaseError,
    InvalidArgumentError,
    NoSpaceError,
    NotFoundError,
    OverloadedError,
    ReplicaNotReadyError,
    StoreError,
)
from mooncake_store.program.openapi import Failed, Why
from mooncake_store.wire.hosts import HOSTS, SPLIT, HostsRequest, Split
from transfer_engine import audit
from transfer_engine.rpc.http import JSON, HttpReply

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from mooncake_store.admin.admission import Admission, Asker
    from mooncake_store.client.aio import AsyncClient
    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.program.openapi import Operation
    from transfer_engine.rpc.http import HttpRequest

    Query: TypeAlias = dict[str, str]

__all__ = ["AdminService"]

FIELDS_MAX = 16
SPLIT_S = 600.0
_STATUSES: tuple[tuple[type[StoreError], int], ...] = (
    (InvalidArgumentError, 400),
    (NotFoundError, 404),
    (AuthError, 403),
    (OverloadedError, 429),
    (HasLeaseError, 409),
    (BusyError, 409),
    (ReplicaNotReadyError, 409),
    (AlreadyExistsError, 409),
    (NoSpaceError, 409),
)
"""What else fails is that the master does not answer: 503."""


class AdminService:
    """Answers for one port; `client_of` returns a client of the master, or raises.

    `tell_refused` logs once in a while who was refused, and why.
    """

    def __init__(
        self,
        client_of: Callable[[], Awaitable[AsyncClient]],
        admission: Admission,
        settings: MasterConfig | None,
        tell_refused: Callable[[socket.socket, str], None],
    ) -> None:
        self._client_of = client_of
        self._admission = admission
        self._settings = settings
        self._tell_refused = tell_refused
        self._split: asyncio.Task[Job] | None = None
        self._operations = {(each.method, each.path): each for each in api.API.operations}

    def has(self, request: HttpRequest) -> bool:
        """Whether a request is for this API."""
        return request.target.startswith(api.BELOW)

    async def answer(self, request: HttpRequest, sock: socket.socket) -> HttpReply:
        """Answer a request."""
        path, _, query = request.target.partition("?")
        if (request.method, path) == ("GET", api.PATH):
            return _told(api.description(asks=self._admission.asks))
        operation = self._operations.get((request.method, path))
        try:
            if operation is None:
                raise NotFoundError(
                    "there is no such path, or not by this method",
                    advice=f"see {api.PATH} for those that there are",
                )
            return await self._answered(operation, request, query, sock)
        except Refused as refused:
            self._tell_refused(sock, refused.error.what)
            return _failed(refused.error, refused.status)
        except StoreError as error:
            status = next((each for kind, each in _STATUSES if isinstance(error, kind)), 503)
            return _failed(error, status)

    async def _answered(
        self, operation: Operation, request: HttpRequest, query: str, sock: socket.socket
    ) -> HttpReply:
        handle = getattr(self, f"_{operation.name}")
        if operation in api.READS:
            told = await handle(_query(query))
            return told if isinstance(told, HttpReply) else _told(told)
        asker = self._admission.admit(request, sock, operation.name.removeprefix("begin_"))
        if operation in api.ADMINS:
            return _told(handle())
        try:
            wish = msgspec.json.decode(request.body, type=operation.body)
        except (ValueError, RecursionError) as error:  # its own errors, and of what is no UTF-8
            raise InvalidArgumentError(
                f"the body is not what is meant: {error}", advice=f"see {api.PATH}"
            ) from None
        return _told(await self._audited(handle, asker, wish))

    async def _audited(self, handle: Any, asker: Asker, wish: Any) -> Any:
        operation = handle.__name__.removeprefix("_begin_")
        try:
            told = await handle(asker, wish)
        except BaseException as error:
            audit.acted(asker.who, asker.peer, operation, wish, error)
            raise
        audit.acted(asker.who, asker.peer, operation, wish, told)
        return told

    async def close(self) -> None:
        """Wait for nothing any more."""
        if self._split is not None:
            self._split.cancel()
            await asyncio.wait({self._split})

    # -- what everybody may ask

    async def _health(self, query: Query) -> Any:
        try:
            await self._client_of()
        except StoreError:
            return api.Health("ok", False, __version__)
        return api.Health("ok", True, __version__)

    async def _ready(self, query: Query) -> Any:
        try:
            found = await (await self._client_of()).status()
        except StoreError as error:
            told = {"ready": False, "problems": [f"not ready: {error.what}"], "standbys": []}
            return _told(told, 503)
        told = {
            "ready": found.ready,
            "problems": [each.what for each in problems(found)],
            "standbys": standbys_value(found.standbys),
        }
        return _told(told, 200 if found.ready else 503)

    async def _status(self, query: Query) -> Any:
        return status_value(await (await self._client_of()).status())

    async def _segments(self, query: Query) -> Any:
        return {"segments": segments_value(await (await self._client_of()).status())}

    async def _workers(self, query: Query) -> Any:
        return {"workers": workers_value(await (await self._client_of()).status())}

    async def _objects(self, query: Query) -> Any:
        client = await self._client_of()
        found, after = await client.list_page(
            query.get("prefix", ""), limit=_limit(query), after=query.get("after", "")
        )
        return api.Objects(
            [
                api.Listed(_text(e.key), e.digest.hex(), e.size, e.created_s, e.replicas)
                for e in found
            ],
            after,
        )

    async def _object(self, query: Query) -> Any:
        found = await (await self._client_of()).stat(query.get("key", ""))
        return {
            name: getattr(found, name)
            for name in api.Object.__struct_fields__
            if name not in ("key", "replicas")
        } | {
            "key": _text(found.key),
            "replicas": [
                {"segment": r.segment, "host": r.host, "offset": r.offset, "tier": r.tier}
                for r in found.replicas
            ],
        }

    async def _jobs(self, query: Query) -> Any:
        client = await self._client_of()
        found = await client._run(list_jobs(client._core))
        if self._split is not None:
            own = await self._split_job(client)
            found = [own, *(job for job in found if job.id != own.id)]
        return api.Jobs([_for_everybody(job) for job in found])

    async def _job(self, query: Query) -> Any:
        client, number = await self._client_of(), query.get("id", "")
        if number == "split" and self._split is not None:
            return await self._split_job(client)
        return _for_everybody(await client._run(find_job(client._core, number)))

    async def _namespaces(self, query: Query) -> Any:
        client, limit, after = await self._client_of(), _limit(query), query.get("after", "")
        found = await client._run(list_namespaces(client._core))
        later = [each for each in found if each.name > after]
        page = later[:limit]
        return api.Namespaces(page, page[-1].name if len(later) > len(page) else "")

    async def _events(self, query: Query) -> Any:
        client, after = await self._client_of(), query.get("after", "")
        steps = events_after(client._core, after, limit=_limit(query), of_default=True)
        found = await client._run(steps)
        return api.Told(found.events, found.after, found.gap)

    # -- what admins may ask

    def _credentials(self) -> Any:
        if self._settings is None or not self._settings.credentials:
            return api.Credentials([], {})
        believed, others = credentials.look(self._settings.credentials)
        now = time.time()
        return {
            "credentials": [credential_value(name, each, now) for name, each in believed.items()],
            "unusable": {name: error.what for name, error in others.items()},
        }

    def _config(self) -> Any:
        if self._settings is None:
            return api.Config({})
        return api.Config(
            {
                each.name: each.kind.show(getattr(self._settings, each.attribute))
                for each in settings_of(type(self._settings))
            }
        )

    # -- what changes something

    async def _begin_drain(self, asker: Asker, wish: api.DrainWish) -> Any:
        client = await self._client_of()
        return await client._run(begin_drain(client._core, wish.segment))

    async def _begin_copy(self, asker: Asker, wish: api.CopyWish) -> Any:
        client = await self._client_for(asker, "copy")
        return await client._run(begin_copy(client._core, wish.key, wish.to))

    async def _begin_move(self, asker: Asker, wish: api.MoveWish) -> Any:
        client = await self._client_for(asker, "move")
        return await client._run(begin_copy(client._core, wish.key, [wish.to], wish.source))

    async def _begin_cancel(self, asker: Asker, wish: api.StopWish) -> Any:
        client = await self._client_of()
        return _for_everybody(await client._run(cancel_job(client._core, wish.id)))

    async def _begin_remove(self, asker: Asker, wish: api.RemoveWish) -> Any:
        if (wish.keys is None) == (wish.prefix is None):
            raise InvalidArgumentError("name either keys or a prefix")
        client = await self._client_for(asker, "remove")
        if wish.prefix is not None:
            return api.Removed(await client.remove_prefix(wish.prefix, force=wish.force), [])
        assert wish.keys is not None
        result = await client.remove_many(wish.keys, force=wish.force)
        stay = [
            api.NotRemoved(wish.keys[at], str(result.error(at))) for at in result.failed.tolist()
        ]
        return api.Removed(len(wish.keys) - len(stay), stay)

    async def _begin_quota(self, asker: Asker, wish: api.QuotaWish) -> Any:
        asker.rights.check_namespace(wish.namespace, "quota", asker.peer)
        client = await self._client_of()
        await client._run(set_quota(client._core, wish.namespace, wish.bytes))
        return api.QuotaGiven(wish.namespace, wish.bytes)

    async def _client_for(self, asker: Asker, operation: str) -> AsyncClient:
        """The client, for somebody who may ask about objects of its namespace."""
        client = await self._client_of()
        asker.rights.check_namespace(client.namespace, operation, asker.peer)
        return client

    async def _begin_split(self, asker: Asker, wish: api.SplitWish) -> Any:
        if self._split is not None and not self._split.done():
            raise BusyError("shards are being split already", advice="wait for that: see /v1/jobs")
        client = await self._client_of()
        until = client._core.until({})
        body = HOSTS.request.pack(HostsRequest())
        before = await client._run(ask_one(CLUSTER, HOSTS, body, until))
        self._split = asyncio.ensure_future(self._carry_out(client, wish.factor, before.run))
        # A master that cannot says so at once.
        await asyncio.wait({self._split}, timeout=1.0)
        return await self._split_job(client)

    async def _carry_out(self, client: AsyncClient, factor: int, run: int) -> Job:
        """Have a master make other shards of its own, and wait until these lead."""
        body, until = SPLIT.request.pack(Split(factor)), time.monotonic() + SPLIT_S
        try:
            await client._run(ask_one(CLUSTER, SPLIT, body, until))
            body = HOSTS.request.pack(HostsRequest())
            while True:
                found = None
                try:
                    once = client._core.until({})
                    found = await client._run(ask_one(CLUSTER, HOSTS, body, once))
                except StoreError:
                    if time.monotonic() >= until:
                        raise
                if found is not None and found.run != run and not found.missing:
                    return _split("failed" if found.split else "done", found.split)
                await asyncio.sleep(0.2)
        except StoreError as error:
            return _split("failed", str(error))

    async def _split_job(self, client: AsyncClient) -> Job:
        assert self._split is not None
        if not self._split.done():
            return _split("running")
        return self._split.result()


def _split(state: Any, message: str = "") -> Job:
    return Job("split", "split", state, "all shards", [], message=message)


def _for_everybody(job: Job) -> Job:
    """A job as whoever reaches the port may see it: without keys of other namespaces."""
    if job.namespace in ("", "default"):
        return job
    return msgspec.structs.replace(job, about=f"an object of {job.namespace}")


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode(errors="backslashreplace")


def _query(query: str) -> Query:
    try:
        fields = parse_qs(query, keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    return {name: values[0] for name, values in fields.items()}


def _limit(query: Query) -> int:
    text = query.get("limit", str(api.LIMIT))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= api.LIMIT_MAX):
        raise InvalidArgumentError(f"limit is a number from 1 to {api.LIMIT_MAX}")
    return int(text)


def _told(content: Any, status: int = 200) -> HttpReply:
    return HttpReply(status, msgspec.json.encode(content), JSON)


def _failed(error: StoreError, status: int) -> HttpReply:
    why = Why(error.code, str(error).removesuffix(f"; {error.advice}"), error.advice)
    return _told(Failed(why), status)
