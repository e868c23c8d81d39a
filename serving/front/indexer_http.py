"""The indexer's HTTP API, as routers of the original expect it: register, unregister, query.

    POST /register       {endpoint, type, modelname, instance_id, block_size, ...}
    POST /unregister     {instance_id, ...}             -> {"removed_instances": [...]}
    POST /query          {model, block_size, token_ids, ...}
    POST /query_by_hash  {model, block_size, seq_hashes, ...}
    GET  /services, /global_view

Answers of queries are token counts: {tenant: {instance: {longest_matched, GPU, DP, CPU, DISK}}}.
A registration with an endpoint is followed over ZeroMQ; one without is fed by whoever made it.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from mooncake_store.errors import ConfigError, InvalidArgumentError
from serving.front.app import BODY_BYTES_MAX, guard, read_json
from serving.front.engine_events import Subscription
from serving.front.indexer import EngineIndex, Registration
from serving.front.openai import BadRequestError

__all__ = ["Indexer", "indexer_application", "indexer_routes"]

BLOCK_TOKENS_MAX = 1 << 16
SOURCES_MAX = 4096


class Indexer:
    """An `EngineIndex` with the subscriptions that feed it; `close` ends them."""

    def __init__(self, index: EngineIndex | None = None) -> None:
        self.index = index or EngineIndex()
        self._subscriptions: dict[str, Subscription] = {}

    async def register(self, registration: Registration) -> None:
        """Keep the blocks of an engine, and follow its events where it says from where."""
        if len(self.index.sources) >= SOURCES_MAX:
            raise BadRequestError(f"there are {SOURCES_MAX} registrations already", status=429)
        await self._end(registration.name)
        source = self.index.register(registration)
        if registration.endpoint:
            try:
                self._subscriptions[registration.name] = Subscription(source)
            except (ConfigError, InvalidArgumentError) as error:
                self.index.unregister(registration.name)
                status = 400 if isinstance(error, InvalidArgumentError) else 501
                raise BadRequestError(str(error), status=status) from error

    async def unregister(self, names: list[str]) -> list[str]:
        """Forget engines by their full names; returns those that were there."""
        removed = []
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


def indexer_application(indexer: Indexer, token: str = "") -> web.Application:
    """The routes; closes the indexer at the end."""
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[guard(token)])
    app.add_routes(indexer_routes(indexer))

    async def close(_: web.Application) -> None:
        await indexer.close()

    app.on_cleanup.append(close)
    return app


def indexer_routes(indexer: Indexer) -> list[web.RouteDef]:
    """The routes alone, for an application that has others too."""
    return _Routes(indexer).table()


class _Routes:
    """Handlers."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer

    def table(self) -> list[web.RouteDef]:
        """Which path leads where."""
        return [
            web.post("/register", self.register),
            web.post("/unregister", self.unregister),
            web.post("/query", self.query),
            web.post("/query_by_hash", self.query_by_hash),
            web.get("/services", self.services),
            web.get("/global_view", self.global_view),
            web.get("/health", self.health),
        ]

    async def register(self, request: web.Request) -> web.Response:
        """Take a source in."""
        body = await _fields(request)
        registration = Registration(
            instance_id=_text(body, "instance_id"),
            model=_text(body, "modelname"),
            block_size=_block_size(body),
            endpoint=_text(body, "endpoint", ""),
            replay_endpoint=_text(body, "replay_endpoint", ""),
            kind=_text(body, "type", "vLLM"),
            tenant=_text(body, "tenant_id", "default"),
            lora=_text(body, "lora_name", ""),
            salt=_text(body, "additionalsalt", ""),
            dp_rank=_number(body, "dp_rank", 0, 0, 1 << 16),
        )
        if "|" in registration.instance_id + registration.tenant:
            raise BadRequestError("instance_id and tenant_id must not contain |")
        await self._indexer.register(registration)
        return web.json_response({"status": "registered", "instance": registration.name})

    async def unregister(self, request: web.Request) -> web.Response:
        """Forget a source, or all ranks of it."""
        body = await _fields(request)
        rank = None if body.get("dp_rank") is None else _number(body, "dp_rank", 0, 0, 1 << 16)
        names = self._indexer.index.matching(
            _text(body, "instance_id"), _text(body, "tenant_id", ""), rank
        )
        return web.json_response({"removed_instances": await self._indexer.unregister(names)})

    async def query(self, request: web.Request) -> web.Response:
        """Say who holds how much of a prompt."""
        body = await _fields(request)
        tokens = body.get("token_ids")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise BadRequestError("token_ids must be a list of whole numbers", param="token_ids")
        try:
            answer = self._indexer.index.query(
                _text(body, "model"), _block_size(body), tokens, **_scope(body)
            )
        except (ValueError, OverflowError) as error:
            raise BadRequestError(f"token_ids: {error}", param="token_ids") from error
        return web.json_response(answer)

    async def query_by_hash(self, request: web.Request) -> web.Response:
        """Say who holds how many of some blocks."""
        body = await _fields(request)
        hashes = body.get("seq_hashes")
        if not isinstance(hashes, list) or not all(isinstance(h, int | str) for h in hashes):
            raise BadRequestError("seq_hashes must be a list of hashes", param="seq_hashes")
        answer = self._indexer.index.query_hashes(
            _text(body, "model"), _block_size(body), hashes, **_scope(body)
        )
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

    async def health(self, request: web.Request) -> web.Response:
        """It answers."""
        return web.json_response({"status": "ok", "sources": len(self._indexer.index.sources)})


async def _fields(request: web.Request) -> dict[str, Any]:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def _text(body: dict[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or (not value and default is None):
        raise BadRequestError(f"{name} must be a text", param=name)
    return value


def _number(body: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise BadRequestError(f"{name} must be a whole number from {low} to {high}", param=name)
    return value


def _block_size(body: dict[str, Any]) -> int:
    return _number(body, "block_size", 0, 1, BLOCK_TOKENS_MAX)


def _scope(body: dict[str, Any]) -> dict[str, str]:
    salt = body.get("cache_salt") or body.get("additionalsalt") or ""
    return {
        "tenant": _text(body, "tenant_id", "default"),
        "lora": _text(body, "lora_name", ""),
        "instance_id": _text(body, "instance_id", ""),
        "salt": str(salt),
    }
