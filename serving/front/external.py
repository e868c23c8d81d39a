"""A front for complete engines (vLLM and others with an OpenAI API): each request to the best one.

    front = ExternalFront({"vllm-0": "http://10.0.0.5:8000", ...})

Which one is best is `EngineRouter`'s decision, from what the indexer knows of their caches. The
prompt is turned into tokens by an engine's own `/tokenize`, only where somebody has registered
events, and a request whose tokens cannot be had is routed by load alone. Requests and answers pass
through byte by byte; the engine's errors are the answer, except that one which cannot be reached,
or says that it is broken before its first byte, is passed over for the next.

A client that goes away ends the request at the engine: its connection is closed. Time to connect
is bounded, and so is the whole request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import web

from serving.front.app import BODY_BYTES_MAX, error_response, guard
from serving.front.indexer_http import Indexer, indexer_routes
from serving.scheduling.routing import EngineRouter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

__all__ = ["ExternalFront", "external_application"]

log = logging.getLogger(__name__)

CONNECT_S = 5.0
TOKENIZE_S = 5.0
_BROKEN = (500, 502, 503, 504)
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te"}


class _Tokenized(msgspec.Struct, frozen=True):
    """What of an engine's answer to /tokenize is of use."""

    tokens: list[int]


class ExternalFront:
    """Engines by name, what they hold, and the connections to them."""

    def __init__(self, engines: Mapping[str, str], deadline_s: float = 600.0) -> None:
        self.engines = {name: url.rstrip("/") for name, url in engines.items()}
        self.indexer = Indexer()
        self.router = EngineRouter()
        for name in self.engines:
            self.router.join(name)
        self._deadline_s = deadline_s
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connections' pool; on the event loop that serves."""
        timeout = aiohttp.ClientTimeout(total=self._deadline_s, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False
        )

    async def close(self) -> None:
        """Close everything. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self.indexer.close()

    # -- requests

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Send a request to an engine and its answer back."""
        raw = await request.read()
        tokens, matches = await self._prompt(raw)
        ticket, tried = secrets.token_hex(8), set[str]()
        while True:
            name = self.router.choose(time.monotonic(), ticket, tokens, matches, tried)
            if name is None:
                return error_response(
                    f"none of {len(self.engines)} engines can be reached",
                    503,
                    code="no_engine",
                    retry_after_s=1.0,
                )
            tried.add(name)
            try:
                response = await self._through(request, raw, name, ticket)
            finally:
                self.router.ended(ticket)
            if response is not None:
                return response

    async def _through(
        self, request: web.Request, raw: bytes, name: str, ticket: str
    ) -> web.StreamResponse | None:
        """One engine's answer; None when it had none and another one should be asked."""
        assert self._session is not None, "start() comes first"
        url, headers = self.engines[name] + request.path_qs, _passed_on(request.headers)
        try:
            answer = await self._session.request(
                request.method, url, data=raw or None, headers=headers
            )
        except aiohttp.ClientConnectionError as error:
            log.warning("engine %s cannot be reached: %s", name, error)
            self.router.failed(time.monotonic(), name)
            return None
        async with answer:
            if answer.status in _BROKEN:
                log.warning("engine %s answers %d", name, answer.status)
                self.router.failed(time.monotonic(), name)
                return None
            self.router.answered(name)
            return await self._relay(request, answer, ticket)

    async def _relay(
        self, request: web.Request, answer: aiohttp.ClientResponse, ticket: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            self.router.answering(ticket)
            await response.write(piece)
        await response.write_eof()
        return response

    # -- prompts

    async def _prompt(self, raw: bytes) -> tuple[int, dict[str, int]]:
        """How many tokens a prompt has, and how many of them each engine holds."""
        index = self.indexer.index
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
        except (ValueError, RecursionError):
            return 0, {}
        guess = len(raw) // 4
        if not index.sources:
            return guess, {}
        tokens = await self._tokens(body)
        if tokens is None:
            return guess, {}
        matches: dict[str, int] = {}
        for scope in {source.registration.scope for source in index.sources.values()}:
            if scope.model == body.get("model", scope.model):
                for name, found in index.matches(scope.model, scope.block_size, tokens).items():
                    matches[name] = max(found, matches.get(name, 0))
        return len(tokens), matches

    async def _tokens(self, body: dict[str, Any]) -> list[int] | None:
        """The tokens of a prompt, asked of an engine; None when none of them says."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return prompt
        question: dict[str, Any] = {
            key: body[key] for key in ("model", "prompt", "messages", "tools") if key in body
        }
        if "messages" in question:
            question["add_generation_prompt"] = True
        assert self._session is not None, "start() comes first"
        now = time.monotonic()
        name = self.router.choose(now, "tokenize", 0, {})
        self.router.ended("tokenize")
        if name is None:
            return None
        try:
            async with (
                asyncio.timeout(TOKENIZE_S),
                self._session.post(self.engines[name] + "/tokenize", json=question) as answer,
            ):
                raw = await answer.read() if answer.status == 200 else b""
            return msgspec.json.decode(raw, type=_Tokenized).tokens
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
            return None

    # -- what it shows

    async def health(self, request: web.Request) -> web.Response:
        """200 while an engine is thought to answer."""
        resting = self.router.resting(time.monotonic())
        there = [name for name in self.engines if name not in resting]
        health = {"serving": bool(there), "engines": there, "resting": sorted(resting)}
        return web.json_response(health, status=200 if there else 503)

    async def stats(self, request: web.Request) -> web.Response:
        """Requests under way by engine."""
        return web.json_response({"engines": self.router.engines})


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that are not of one connection."""
    return {key: value for key, value in headers.items() if key.lower() not in _HOP_BY_HOP}


def external_application(front: ExternalFront, token: str = "") -> web.Application:
    """The engines' API with routing, and the indexer's beside it."""

    async def life(_: web.Application) -> AsyncGenerator[None, None]:
        await front.start()
        yield
        await front.close()

    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[guard(token)])
    app.add_routes(
        [
            web.get("/health", front.health),
            web.get("/stats", front.stats),
            *indexer_routes(front.indexer),
            web.route("*", "/v1/{rest:.*}", front.forward),
        ]
    )
    app.cleanup_ctx.append(life)
    return app
