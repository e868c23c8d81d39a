"""A front for complete engines (vLLM and others with an OpenAI API): each request to the best one.

    front = ExternalFront({"vllm-0": "http://10.0.0.5:8000", ...})

Which one is best is `EngineRouter`'s decision by a placement policy, from what the indexer knows of
their caches, what they tell of their load (`EngineWatch`) and what the front sees of its own
requests: when they began, their first bytes, and the `usage` that answers end with. The prompt is
turned into tokens by an engine's own `/tokenize`, only where somebody has registered events, and a
request whose tokens cannot be had is routed by load alone. Bodies pass through byte by byte; the
engine's errors are the answer, except that one which cannot be reached, or says that it is broken
before its first byte, is passed over for the next. So is one that sends us elsewhere: a redirect is
not followed, since only the operator says where prompts go.

Of an engine's API there is what `engines_api` names, and of headers what `_ASKED` and `_ANSWERED`
name: engines have paths for operators too, and what a client proves to this server, or keeps for
it, is none of an engine's business. An engine's own key is the operator's to give.

A client that goes away ends the request at the engine: its connection is closed. Time to connect
is bounded, and so is the whole request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from mooncake_store.program.logs import request_id
from mooncake_store.program.shell import REQUEST_ID
from serving.front.app import error_response, openai_application
from serving.front.engine_load import EngineWatch
from serving.front.engine_places import EnginePlaces
from serving.front.engine_prompts import EnginePrompts
from serving.front.engines_api import API
from serving.front.indexer_http import Indexer, indexer_handlers
from serving.front.usage import UsageTail
from serving.scheduling.placement import LocalCache
from serving.scheduling.routing import EngineRouter, Wanted
from serving.scheduling.views import Demand

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

    from mooncake_store.program.shell import Shell
    from serving.scheduling.placement import PlacementPolicy

__all__ = ["ExternalFront", "external_application"]

log = logging.getLogger(__name__)

CONNECT_S = 5.0
TOKENIZE_S = 5.0
_BROKEN = (500, 502, 503, 504)
_ELSEWHERE = range(300, 400)
_ASKED = (
    "Accept", "Accept-Encoding", "Content-Type", "User-Agent", "traceparent", "tracestate",
    "anthropic-version", "anthropic-beta", "OpenAI-Beta",
)  # fmt: skip
_ANSWERED = (
    "Content-Type", "Content-Encoding", "Cache-Control", "Retry-After", "X-Request-Id",
    "openai-processing-ms",
)  # fmt: skip


class _Tokenized(msgspec.Struct, frozen=True):
    """What of an engine's answer to /tokenize is of use."""

    tokens: list[int]


class _Prompt(NamedTuple):
    """A request as the router sees it, and the blocks of its prompt."""

    wanted: Wanted
    chain: Sequence[bytes] = ()


class ExternalFront:
    """Engines by name, what they hold and have to do, and the connections to them.

    Engines pull nothing from each other because a front says so: a policy that does reckon with
    pulling, `CacheCentric`, is none for them.
    """

    def __init__(
        self,
        engines: Mapping[str, str],
        deadline_s: float = 600.0,
        policy: PlacementPolicy | None = None,
        *,
        key: str = "",
        networks: Collection[str] = (),
        judge: ssl.SSLContext | None = None,
    ) -> None:
        """`judge` says whom to believe of those that are reached by https; None is as usual."""
        self._judge = judge
        self.engines = {name: url.rstrip("/") for name, url in engines.items()}
        hosts = [URL(url).host or "" for url in engines.values()]
        self.indexer = Indexer(EnginePlaces(hosts, networks))
        self._own_headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._prompts = EnginePrompts(self.indexer.index)
        self.router = EngineRouter(policy or LocalCache())
        for name in self.engines:
            self.router.join(name)
        self._watch = EngineWatch(self.engines, self.router)
        self._deadline_s = deadline_s
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connections' pool and ask for loads; on the event loop that serves."""
        timeout = aiohttp.ClientTimeout(total=self._deadline_s, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0, ssl=self._judge or True)
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            auto_decompress=False,
            headers=self._own_headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._watch.start(self._session)

    async def close(self) -> None:
        """Close everything. Idempotent."""
        await self._watch.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self.indexer.close()

    # -- requests

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Send a request to an engine and its answer back."""
        raw = await request.read()
        prompt = await self._prompt(raw)
        ticket, tried = secrets.token_hex(8), set[str]()
        while True:
            name = self.router.choose(time.monotonic(), ticket, prompt.wanted, tried)
            if name is None:
                return error_response(
                    f"none of {len(self.engines)} engines can be reached",
                    503,
                    code="no_engine",
                    retry_after_s=1.0,
                )
            tried.add(name)
            self._prompts.expect(name, prompt.chain)
            try:
                response = await self._through(request, raw, name, ticket)
            finally:
                self.router.ended(time.monotonic(), ticket)
                self._prompts.settle(name, prompt.chain)
            if response is not None:
                return response

    async def _through(
        self, request: web.Request, raw: bytes, name: str, ticket: str
    ) -> web.StreamResponse | None:
        """One engine's answer; None when it had none and another one should be asked."""
        assert self._session is not None, "start() comes first"
        # The path is one of ours, in the one way of writing it; of a query no engine knows.
        url = URL(self.engines[name] + request.path, encoded=True)
        headers = {"Accept-Encoding": "identity"} | _of(request.headers, _ASKED)
        headers[REQUEST_ID] = request_id()
        try:
            answer = await self._session.request(
                request.method, url, data=raw or None, headers=headers, allow_redirects=False
            )
        except aiohttp.ClientConnectionError as error:
            log.warning("engine %s cannot be reached: %s", name, error)
            self.router.failed(time.monotonic(), name)
            return None
        async with answer:
            if answer.status in _BROKEN or answer.status in _ELSEWHERE:
                log.warning("engine %s answers %d", name, answer.status)
                self.router.failed(time.monotonic(), name)
                return None
            self.router.answered(name)
            return await self._relay(request, answer, ticket)

    async def _relay(
        self, request: web.Request, answer: aiohttp.ClientResponse, ticket: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=_of(answer.headers, _ANSWERED))
        await response.prepare(request)
        tail = UsageTail()
        async for piece in answer.content.iter_any():
            self.router.answering(time.monotonic(), ticket)
            tail.take(piece)
            await response.write(piece)
        if answer.status == 200:
            self.router.ended(time.monotonic(), ticket, tail.read(), finished=True)
        await response.write_eof()
        return response

    # -- prompts

    async def _prompt(self, raw: bytes) -> _Prompt:
        """What a request wants, how much of its prompt engines have, or will have."""
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
        except (ValueError, RecursionError):
            return _Prompt(Wanted(Demand(0)))
        streamed = body.get("stream") is True
        tokens = await self._tokens(body) if self.indexer.index.sources else None
        if tokens is None:
            return _Prompt(Wanted(Demand(len(raw) // 4), streamed))
        model = body.get("model")
        try:
            known = self._prompts.find(model if isinstance(model, str) else "", tokens)
        except (ValueError, OverflowError):  # no tokens of any model, as the engine will say
            return _Prompt(Wanted(Demand(len(raw) // 4), streamed))
        demand = Demand(len(tokens), known.matches, coming=known.coming)
        return _Prompt(Wanted(demand, streamed, True, known.told), known.chain)

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
        name = self.router.idlest(time.monotonic())
        if name is None:
            return None
        try:
            async with (
                asyncio.timeout(TOKENIZE_S),
                self._session.post(
                    self.engines[name] + "/tokenize", json=question, allow_redirects=False
                ) as answer,
            ):
                raw = await answer.read() if answer.status == 200 else b""
            return msgspec.json.decode(raw, type=_Tokenized).tokens
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
            return None

    # -- what it shows

    async def health(self, request: web.Request) -> web.Response:
        """200 while an engine is thought to answer."""
        resting, unwell = self.router.resting(time.monotonic()), self.router.unwell()
        there = [name for name in self.engines if name not in resting | unwell]
        health = {
            "serving": bool(there),
            "engines": there,
            "resting": sorted(resting),
            "passed_over": sorted(unwell),
        }
        return web.json_response(health, status=200 if there else 503)

    async def stats(self, request: web.Request) -> web.Response:
        """Requests under way by engine, their loads, and how first tokens are predicted."""
        recent = self.router.recent
        fixed_s, token_s, square_s = self.router.costs.prefill.coefficients
        first = {
            "count": len(recent),
            "measured_s": _median([each.measured_s for each in recent]),
            "predicted_s": _median([each.predicted_s for each in recent]),
            "off_s": _median([abs(each.measured_s - each.predicted_s) for each in recent]),
        }
        return web.json_response(
            {
                "engines": self.router.engines,
                "load": self._watch.loads,
                "first_tokens": first,
                "prefill": {"fixed_s": fixed_s, "token_s": token_s, "square_s": square_s},
            }
        )


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _of(headers: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Those of some names."""
    return {name: headers[name] for name in names if name in headers}


def external_application(front: ExternalFront, shell: Shell) -> web.Application:
    """The engines' API with routing, and the indexer's beside it."""

    async def life(_: web.Application) -> AsyncGenerator[None, None]:
        await front.start()
        yield
        await front.close()

    own = {name: getattr(front, name) for name in ("health", "stats", "forward")}
    app = openai_application(shell, API, own | indexer_handlers(front.indexer))
    app.cleanup_ctx.append(life)
    return app
