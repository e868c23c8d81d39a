"""A front for engines elsewhere: the one that has the prompt, and another when that one fails."""

import asyncio
import json
import socket
import struct

import aiohttp
import pytest

from serving.front.indexer import Stored
from serving.scheduling.learnt import LearntPrefill
from serving.scheduling.placement import RoundRobin
from tests.serving.front.engines import TOKENS, Engine, routing
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio

ONE = {"instance_id": "a", "modelname": "m", "block_size": 16, "type": "vLLM"}


async def register(http, url, *names):
    for name in names:
        async with http.post(url + "/register", json=ONE | {"instance_id": name}) as response:
            assert response.status == 200


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
        await register(http, url, *engines)
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


async def test_round_robin_takes_turns_also_where_somebody_has_the_prompt(http):
    engines = {"a": Engine(), "b": Engine()}
    async with routing(engines, RoundRobin()) as (url, front):
        await register(http, url, *engines)
        front.indexer.index.sources["b|default|0"].apply(Stored((1, 2, 3, 4), None, tuple(TOKENS)))
        for _ in range(4):
            await ask(http, url)
        assert [len(engine.seen) for engine in engines.values()] == [2, 2]


async def test_prompts_that_begin_alike_and_come_together_go_to_one_engine(http):
    engines = {"a": Engine(), "b": Engine()}
    engines["a"].hang = engines["b"].hang = True
    async with routing(engines) as (url, front):
        await register(http, url, *engines)
        # A token costs much, so that what is to be computed twice is seen.
        front.router.costs.prefill = LearntPrefill((0.0, 1.0, 0.0))
        asking = [asyncio.create_task(ask(http, url, stream=True)) for _ in range(3)]
        await until_async(lambda: sum(len(engine.seen) for engine in engines.values()) == 3)
        assert sorted(len(engine.seen) for engine in engines.values()) == [0, 3]
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until_async(lambda: front.router.engines == {"a": 0, "b": 0})


async def test_what_streams_take_and_say_of_their_prompts_is_learnt_and_shown(http):
    engines = {"a": Engine()}
    engines["a"].usage = {"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": 100}}
    async with routing(engines) as (url, _):
        for stream in False, True:
            await ask(http, url, stream=stream)
        async with http.get(url + "/stats") as response:
            figures = await response.json()
    assert figures["first_tokens"]["count"] == 1
    assert 0 < figures["first_tokens"]["measured_s"] < 60
    assert figures["first_tokens"]["predicted_s"] > 0
    assert figures["prefill"] != {"fixed_s": 0.01, "token_s": 2e-4, "square_s": 1e-8}
    assert figures["load"]["a"]["missing"]


async def test_a_refusal_tells_nothing_of_what_prompts_take(http):
    engines = {"a": Engine()}
    engines["a"].status = 429
    async with routing(engines) as (url, front):
        await register(http, url, "a")
        front.indexer.index.sources["a|default|0"].apply(Stored((9,), None, tuple(range(16))))
        before = front.router.costs.prefill.coefficients
        assert (await ask(http, url, stream=True))[0] == 429
        assert front.router.costs.prefill.coefficients == before
        assert not front.router.recent
        engines["a"].status = 200
        await ask(http, url, stream=True)
        assert front.router.costs.prefill.coefficients != before


async def test_an_engine_that_is_silent_is_routed_around_and_joins_again(http, monkeypatch):
    monkeypatch.setattr("serving.front.engine_load.INTERVAL_S", 0.01)
    monkeypatch.setattr("serving.front.engine_load.DEADLINE_S", 0.5)
    engines = {"a": Engine(), "b": Engine()}
    engines["a"].mute = True

    async def health():
        async with http.get(url + "/health") as response:
            return response.status, await response.json()

    async with routing(engines) as (url, front):
        await until_async(lambda: front.router.unwell() == {"a"})
        for _ in range(3):
            assert (await ask(http, url))[0] == 200
        assert [len(engine.seen) for engine in engines.values()] == [0, 3]
        assert await health() == (
            200, {"serving": True, "engines": ["b"], "resting": [], "passed_over": ["a"]}
        )  # fmt: skip
        engines["a"].mute = False
        await until_async(lambda: not front.router.unwell())
        for _ in range(4):
            await ask(http, url)
        assert len(engines["a"].seen) >= 2
