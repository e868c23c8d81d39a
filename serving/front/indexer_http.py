"""The indexer's HTTP API, as routers of the original expect it: register, unregister, query.

    POST /register       {endpoint, type, modelname, instance_id, block_size, ...}
    POST /unregister     {instance_id, ...}             -> {"removed_instances": [...]}
    POST /query          {model, block_size, token_ids, ...}
    POST /query_by_hash  {model, block_size, seq_hashes, ...}
    GET  /services, /global_view

Answers of queries are token counts: {tenant: {instance: {longest_matched, GPU, DP, CPU, DISK}}}.
A registration with an endpoint is followed over ZeroMQ, where the operator lets it lead
(`engine_places`); one without is fed by whoever made it. Registering is for administrators.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from mooncake_store.errors import ConfigError, InvalidArgumentError
from mooncake_store.program.openapi import Answer, Operation, Shape
from serving.front.answers import OpenAIError
from serving.front.engine_events import Subscription
from serving.front.engine_places import EnginePlaces
from serving.front.indexer import EngineIndex, Registration, ScopeKey
from serving.front.openai import BadRequestError, Text, decode_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["INDEXER_OPERATIONS", "Indexer", "indexer_handlers"]

SOURCES_MAX = 4096
SUBSCRIPTIONS_MAX = 256
"""Each has two threads and six descriptors."""

LABEL_CHARS_MAX = 1024
"""Of each name, address and salt of a registration: all of them are remembered."""

Label = Annotated[str, Meta(max_length=LABEL_CHARS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=LABEL_CHARS_MAX)]
BlockSize = Annotated[int, Meta(ge=1, le=1 << 16)]
Rank = Annotated[int, Meta(ge=0, le=1 << 16)]


class RegisterBody(msgspec.Struct, frozen=True):
    """A body of /register; null says what leaving a field out says."""

    instance_id: Name
    modelname: Name
    block_size: BlockSize
    endpoint: Label | None = None
    replay_endpoint: Label | None = None
    type: Label | None = None
    tenant_id: Label | None = None
    lora_name: Label | None = None
    additionalsalt: Label | None = None
    dp_rank: Rank = 0


class UnregisterBody(msgspec.Struct, frozen=True):
    """A body of /unregister; without a rank all of them, without a tenant those of each."""

    instance_id: Text
    tenant_id: str | None = None
    dp_rank: Rank | None = None


class Query(msgspec.Struct, frozen=True):
    """What both kinds of queries name."""

    model: Text
    block_size: BlockSize
    tenant_id: str | None = None
    lora_name: str | None = None
    instance_id: str | None = None
    cache_salt: str | int | None = None
    additionalsalt: str | int | None = None

    @property
    def scope(self) -> ScopeKey:
        """As `EngineIndex` takes it."""
        given = _given(tenant=self.tenant_id, lora=self.lora_name)
        salt = str(self.cache_salt or self.additionalsalt or "")
        return ScopeKey(self.model, self.block_size, salt=salt, **given)


class TokenQuery(Query, frozen=True, kw_only=True):
    """A body of /query."""

    token_ids: list[int]


class HashQuery(Query, frozen=True, kw_only=True):
    """A body of /query_by_hash."""

    seq_hashes: list[int | str]


def _given(**fields: str | None) -> dict[str, str]:
    """The fields that a body has; for the others the defaults hold of who is called."""
    return {name: value for name, value in fields.items() if value is not None}


class Indexer:
    """An `EngineIndex` with the subscriptions that feed it; `close` ends them."""

    def __init__(self, places: EnginePlaces | None = None) -> None:
        self.index = EngineIndex()
        self._places = places or EnginePlaces()
        self._subscriptions: dict[str, Subscription] = {}
        # Ending one takes a while, in which another one of its name must not begin.
        self._changing = asyncio.Lock()

    async def register(self, registration: Registration) -> None:
        """Keep the blocks of an engine, and follow its events where it says from where."""
        for endpoint in filter(None, (registration.endpoint, registration.replay_endpoint)):
            try:
                self._places.check(endpoint)
            except InvalidArgumentError as error:
                raise BadRequestError(str(error), status=400) from error
        async with self._changing:
            await self._register(registration)

    async def _register(self, registration: Registration) -> None:
        name = registration.name
        if len(self.index.sources.keys() - {name}) >= SOURCES_MAX:
            raise BadRequestError(f"there are {SOURCES_MAX} registrations already", status=429)
        followed = len(self._subscriptions.keys() - {name})
        if registration.endpoint and followed >= SUBSCRIPTIONS_MAX:
            raise BadRequestError(f"{SUBSCRIPTIONS_MAX} engines are followed already", status=429)
        await self._end(name)
        source = self.index.register(registration)
        if registration.endpoint:
            try:
                self._subscriptions[name] = Subscription(source)
            except (ConfigError, InvalidArgumentError) as error:
                self.index.unregister(name)
                status = 400 if isinstance(error, InvalidArgumentError) else 501
                raise BadRequestError(str(error), status=status) from error

    async def unregister(self, names: list[str]) -> list[str]:
        """Forget engines by their full names; returns those that were there."""
        removed = []
        async with self._changing:
            for name in names:
                await self._end(name)
                if self.index.unregister(name):
                    removed.append(name)
        return removed

    async def _end(self, name: str) -> None:
        subscription = self._subscriptions.pop(name, None)
        if subscription is not None:
            await subscription.close()

    async def close(self) -> None:
        """End all subscriptions. Idempotent."""
        for name in list(self._subscriptions):
            await self._end(name)


class Registered(Shape, frozen=True):
    """An engine, by its full name."""

    status: Literal["registered"]
    instance: str


class Unregistered(Shape, frozen=True):
    """Those that were there."""

    removed_instances: list[str]


class Held(Shape, frozen=True):
    """Tokens of a prompt that an engine holds, by tier; of GPUs by rank as well."""

    longest_matched: int
    gpu: int = msgspec.field(name="GPU")
    ranks: dict[str, int] = msgspec.field(name="DP")
    cpu: int = msgspec.field(name="CPU")
    disk: int = msgspec.field(name="DISK")


class Service(Shape, frozen=True):
    """A registration."""

    instance_id: str
    type: str
    modelname: str
    tenant_id: str
    lora_name: str
    block_size: int
    dp_rank: int
    endpoint: str
    replay_endpoint: str


class Services(Shape, frozen=True):
    """All registrations."""

    services: list[Service]


class Kept(Shape, frozen=True):
    """Blocks that a source holds, and those that nobody could make use of."""

    blocks: int
    dropped: int


_NO_BODY = Answer(400, "the body is none that is meant", OpenAIError)
_FOUND = Answer(200, "tokens by tenant and instance", dict[str, dict[str, Held]])

INDEXER_OPERATIONS = (
    Operation(
        "register", "POST", "/register", "Take an engine in, and follow its events",
        (
            Answer(200, "it is registered", Registered),
            Answer(400, "the body is none that is meant, or leads elsewhere", OpenAIError),
            Answer(429, "there are as many as may be", OpenAIError),
            Answer(501, "this server cannot follow events", OpenAIError),
        ),
        RegisterBody, access="admin",
        examples=({"instance_id": "a", "type": "vLLM", "modelname": "llama", "block_size": 16},),
    ),
    Operation(
        "unregister", "POST", "/unregister", "Forget an engine, or all ranks of it",
        (Answer(200, "those that were there", Unregistered), _NO_BODY),
        UnregisterBody, access="admin", examples=({"instance_id": "a"},),
    ),
    Operation(
        "query", "POST", "/query", "Say who holds how much of a prompt",
        (_FOUND, _NO_BODY), TokenQuery,
        examples=({"model": "llama", "block_size": 16, "token_ids": [*range(32)]},),
    ),
    Operation(
        "query_by_hash", "POST", "/query_by_hash", "Say who holds how many of some blocks",
        (_FOUND, _NO_BODY), HashQuery,
        examples=({"model": "llama", "block_size": 16, "seq_hashes": [1, "2"]},),
    ),
    Operation(
        "services", "GET", "/services", "Say who is registered",
        (Answer(200, "all registrations", Services),),
    ),
    Operation(
        "global_view", "GET", "/global_view", "Say how many blocks each source holds",
        (Answer(200, "blocks by source", dict[str, Kept]),),
    ),
)  # fmt: skip


def indexer_handlers(
    indexer: Indexer,
) -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
    """Handlers for `INDEXER_OPERATIONS`, of an application that closes the indexer at its end."""
    handlers = _Handlers(indexer)
    return {each.name: getattr(handlers, each.name) for each in INDEXER_OPERATIONS}


class _Handlers:
    """What the routes lead to."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer

    async def register(self, request: web.Request) -> web.Response:
        """Take a source in."""
        body = decode_body(await request.read(), RegisterBody)
        registration = Registration(
            body.instance_id,
            body.modelname,
            body.block_size,
            dp_rank=body.dp_rank,
            **_given(
                endpoint=body.endpoint,
                replay_endpoint=body.replay_endpoint,
                kind=body.type,
                tenant=body.tenant_id,
                lora=body.lora_name,
                salt=body.additionalsalt,
            ),
        )
        if "|" in registration.instance_id + registration.tenant:
            raise BadRequestError("instance_id and tenant_id must not contain |")
        await self._indexer.register(registration)
        return web.json_response({"status": "registered", "instance": registration.name})

    async def unregister(self, request: web.Request) -> web.Response:
        """Forget a source, or all ranks of it."""
        body = decode_body(await request.read(), UnregisterBody)
        index = self._indexer.index
        names = index.matching(body.instance_id, body.tenant_id or "", body.dp_rank)
        return web.json_response({"removed_instances": await self._indexer.unregister(names)})

    async def query(self, request: web.Request) -> web.Response:
        """Say who holds how much of a prompt."""
        body = decode_body(await request.read(), TokenQuery)
        index = self._indexer.index
        try:
            answer = index.query(body.scope, body.token_ids, body.instance_id or "")
        except (ValueError, OverflowError) as error:
            raise BadRequestError(f"token_ids: {error}", param="token_ids") from error
        return web.json_response(answer)

    async def query_by_hash(self, request: web.Request) -> web.Response:
        """Say who holds how many of some blocks."""
        body = decode_body(await request.read(), HashQuery)
        index = self._indexer.index
        answer = index.query_hashes(body.scope, body.seq_hashes, body.instance_id or "")
        return web.json_response(answer)

    async def services(self, request: web.Request) -> web.Response:
        """Who is registered."""
        entries = [source.registration for source in self._indexer.index.sources.values()]
        listed = [
            {
                "instance_id": entry.instance_id,
                "type": entry.kind,
                "modelname": entry.model,
                "tenant_id": entry.tenant,
                "lora_name": entry.lora,
                "block_size": entry.block_size,
                "dp_rank": entry.dp_rank,
                "endpoint": entry.endpoint,
                "replay_endpoint": entry.replay_endpoint,
            }
            for entry in entries
        ]
        return web.json_response({"services": listed})

    async def global_view(self, request: web.Request) -> web.Response:
        """How many blocks each source holds."""
        sources = self._indexer.index.sources
        return web.json_response(
            {
                name: {"blocks": source.blocks, "dropped": source.dropped}
                for name, source in sources.items()
            }
        )
