"""A front for engines elsewhere: the one that has the prompt, and another when that one fails."""

import asyncio
import contextlib
import json
import socket
import struct

import aiohttp
import pytest
from aiohttp import web

from serving.front.external import ExternalFront, external_application
from serving.front.indexer import Stored
from tests.serving.front.conftest import listening
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio

TOKENS = list(range(1000, 1064))


class Engine:
    """An engine with OpenAI's API, played."""

    def __init__(self):
        self.seen = []
        self.status = 200
        self.ended = asyncio.Event()
        self.asked = asyncio.Event()
        self.hang = False

    def application(self):
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", self.complete),
                web.post("/tokenize", self.tokenize),
                web.get("/v1/models", self.models),
            ]
        )
        return app

    async def tokenize(self, request):
        return web.json_response({"count": len(TOKENS), "tokens": TOKENS})

    async def models(self, request):
        return web.json_response({"data": [{"id": "m"}]})

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
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.ended.set()
        return response


@contextlib.asynccontextmanager
async def routing(engines):
    """(URL of the front, the front) before engines by name."""
    async with contextlib.AsyncExitStack() as stack:
        urls = {
            name: await stack.enter_async_context(listening(engine.application()))
            for name, engine in engines.items()
        }
        front = ExternalFront(urls)
        url = await stack.enter_async_context(listening(external_application(front)))
        yield url, front


async def ask(http, url, **body):
    async with http.post(url + "/v1/completions", json={"model": "m", "prompt": "p"} | body) as r:
        return r.status, await r.read()


async def test_requests_take_turns_and_pass_through_as_they_are(http):
    engines = {"a": Engine(), "b": Engine()}
    async with routing(engines) as (url, _):
        for number in range(4):
            status, raw = await ask(http, url, user=f"u{number}", strange=[1, {"x": None}])
            assert (status, raw) == (200, b"data: one\n\ndata: [DONE]\n\n")
        assert [len(engine.seen) for engine in engines.values()] == [2, 2]
        assert engines["a"].seen[0]["strange"] == [1, {"x": None}]
        async with http.get(url + "/v1/models") as response:
            assert (await response.json())["data"] == [{"id": "m"}]


async def test_the_engine_that_has_the_prompt_gets_it(http):
    engines = {"a": Engine(), "b": Engine(), "c": Engine()}
    async with routing(engines) as (url, front):
        for name in engines:
            body = {"instance_id": name, "modelname": "m", "block_size": 16, "type": "vLLM"}
            async with http.post(url + "/register", json=body) as response:
                assert response.status == 200
        source = front.indexer.index.sources["b|default|0"]
        source.apply(Stored((1, 2, 3, 4), None, tuple(TOKENS)))
        for _ in range(3):
            await ask(http, url)
        assert len(engines["b"].seen) == 3
        query = {"model": "m", "block_size": 16, "token_ids": TOKENS}
        async with http.post(url + "/query", json=query) as response:
            assert (await response.json())["default"]["b"]["longest_matched"] == 64


@pytest.mark.parametrize("status", [500, 503])
async def test_an_engine_that_fails_is_passed_over_and_rests(http, status):
    engines = {"a": Engine(), "b": Engine()}
    engines["a"].status = status
    async with routing(engines) as (url, _):
        for _ in range(4):
            assert (await ask(http, url))[0] == 200
        assert len(engines["a"].seen) == 1
        async with http.get(url + "/health") as response:
            assert (await response.json())["resting"] == ["a"]


async def test_an_engine_that_is_gone_is_passed_over(http):
    engines = {"a": Engine(), "b": Engine()}
    async with routing(engines) as (url, front):
        front.engines["a"] = "http://127.0.0.1:1"
        for _ in range(3):
            assert (await ask(http, url))[0] == 200
        front.engines["b"] = "http://127.0.0.1:1"
        status, raw = await ask(http, url)
        assert status == 503
        assert json.loads(raw)["error"]["code"] == "no_engine"


async def test_an_engine_that_breaks_off_before_it_answers_is_passed_over(http):
    async def break_off(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        reset = struct.pack("@ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()

    engines = {"a": Engine(), "b": Engine()}
    async with (
        await asyncio.start_server(break_off, "127.0.0.1", 0) as broken,
        routing(engines) as (url, front),
    ):
        host, port = broken.sockets[0].getsockname()
        front.engines["a"] = f"http://{host}:{port}"
        for _ in range(3):
            assert (await ask(http, url))[0] == 200
        assert len(engines["b"].seen) == 3


async def test_an_engines_refusal_is_the_answer(http):
    engines = {"a": Engine()}
    engines["a"].status = 429
    async with routing(engines) as (url, _):
        assert (await ask(http, url))[0] == 429


async def test_a_client_that_goes_away_ends_the_request_at_the_engine():
    engines = {"a": Engine()}
    engines["a"].hang = True
    async with routing(engines) as (url, front):
        async with aiohttp.ClientSession() as http:
            asking = asyncio.create_task(ask(http, url))
            await asyncio.wait_for(engines["a"].asked.wait(), 10)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(engines["a"].ended.wait(), 10)
        await until_async(lambda: front.router.engines == {"a": 0})
