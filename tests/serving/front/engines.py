"""Engines with OpenAI's API, played, and a front before them."""

import asyncio
import contextlib
import json

from aiohttp import web

from mooncake_store.program.shell import Shell
from serving.front.external import ExternalFront, external_application
from tests.serving.front.conftest import listening

SHELL = Shell(admin_token="of administrators")
ADMIN = {"Authorization": f"Bearer {SHELL.admin_token}"}
TOKENS = list(range(1000, 1064))


class Engine:
    """One of them."""

    def __init__(self):
        self.seen = []
        self.heads = []
        self.leads_to = ""
        """Where it sends whoever asks it."""
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
                web.route("*", "/{rest:.*}", self.other),
            ]
        )
        return app

    async def other(self, request):
        """What only operators ask for."""
        self.seen.append(request.path)
        return web.Response(text="done")

    async def tokenize(self, request):
        self.heads.append((request.path_qs, request.headers))
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
        try:
            body = await request.json()
        except ValueError:
            return web.json_response({"error": {"message": "no JSON"}}, status=400)
        self.seen.append(body)
        self.heads.append((request.path_qs, request.headers))
        self.asked.set()
        if self.leads_to:
            raise web.HTTPTemporaryRedirect(self.leads_to)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse(
            headers={
                "Set-Cookie": "session=of the engine", "Access-Control-Allow-Origin": "*",
                "Proxy-Authenticate": "Basic", "X-Request-Id": "7",
            }
        )  # fmt: skip
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
async def routing(engines, policy=None, shell=SHELL, **settings):
    """(URL of the front, the front) before engines by name."""
    async with contextlib.AsyncExitStack() as stack:
        urls = {
            name: await stack.enter_async_context(listening(engine.application()))
            for name, engine in engines.items()
        }
        front = ExternalFront(urls, policy=policy, **settings)
        url = await stack.enter_async_context(listening(external_application(front, shell)))
        yield url, front
