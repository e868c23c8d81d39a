"""Engines with OpenAI's API, played, and a front before them."""

import asyncio
import contextlib
import json

from aiohttp import web

from serving.front.external import ExternalFront, external_application
from tests.serving.front.conftest import listening

TOKENS = list(range(1000, 1064))


class Engine:
    """One of them."""

    def __init__(self):
        self.seen = []
        self.status = 200
        self.ended = asyncio.Event()
        self.asked = asyncio.Event()
        self.hang = False
        self.usage = {}
        self.metrics = None
        self.asked_for_metrics = 0
        self.mute = False
        """Whether it leaves questions about its load unanswered."""

    def application(self):
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", self.complete),
                web.post("/tokenize", self.tokenize),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.told),
            ]
        )
        return app

    async def tokenize(self, request):
        return web.json_response({"count": len(TOKENS), "tokens": TOKENS})

    async def models(self, request):
        return web.json_response({"data": [{"id": "m"}]})

    async def told(self, request):
        self.asked_for_metrics += 1
        if self.mute:
            await asyncio.Event().wait()
        if isinstance(self.metrics, int):
            return web.Response(status=self.metrics)
        return web.Response(text=self.metrics) if self.metrics else web.Response(status=404)

    async def complete(self, request):
        body = await request.json()
        self.seen.append(body)
        self.asked.set()
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        try:
            await response.write(b"data: one\n\n")
            if self.hang:
                await asyncio.Event().wait()
            if self.usage:
                said = json.dumps({"choices": [], "usage": self.usage})
                await response.write(f"data: {said}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.ended.set()
        return response


@contextlib.asynccontextmanager
async def routing(engines, policy=None):
    """(URL of the front, the front) before engines by name."""
    async with contextlib.AsyncExitStack() as stack:
        urls = {
            name: await stack.enter_async_context(listening(engine.application()))
            for name, engine in engines.items()
        }
        front = ExternalFront(urls, policy=policy)
        url = await stack.enter_async_context(listening(external_application(front)))
        yield url, front
