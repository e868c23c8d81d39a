"""A front for engines elsewhere: the one that has the prompt, and another when that one fails."""

import asyncio
import json
import re
import socket
import struct
import time

import aiohttp
import pytest

from mooncake_store.program.shell import Shell
from serving.front.indexer import Registration, Stored
from serving.scheduling.learnt import LearntPrefill
from serving.scheduling.placement import RoundRobin
from tests.serving.front.conftest import listening
from tests.serving.front.engines import ADMIN, TOKENS, Engine, routing
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio

ONE = {"instance_id": "a", "modelname": "m", "block_size": 16, "type": "vLLM"}


async def register(http, url, *names):
    for name in names:
        body = ONE | {"instance_id": name}
        async with http.post(url + "/register", json=body, headers=ADMIN) as response:
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


CREDENTIALS = {
    "Authorization": "Bearer of the client", "Cookie": "session=of the client",
    "X-Api-Key": "k", "Api-Key": "k", "X-Goog-Api-Key": "k", "Proxy-Authorization": "Basic k",
    "Proxy-Connection": "x", "X-Forwarded-For": "10.0.0.1", "X-Auth-Token": "k",
    "Connection": "close, X-Mine", "X-Mine": "k", "Origin": "http://front.example",
}  # fmt: skip


@pytest.mark.parametrize("token", [-1, 1 << 63, 1 << 70])
async def test_what_no_token_can_be_is_left_to_the_engine_to_refuse(http, token):
    engines = {"a": Engine()}
    async with routing(engines) as (url, front):
        front.indexer.index.register(Registration("a", "m", 1))
        asked = {"model": "m", "prompt": [7, token]}
        async with http.post(url + "/v1/completions", json=asked) as response:
            assert response.status == 200
    assert len(engines["a"].seen) == 1


async def test_what_a_client_proves_to_the_front_no_engine_is_told(http):
    engines = {"a": Engine()}
    shell = Shell(token="of the client", names=("front.example",))
    async with routing(engines, shell=shell) as (url, front):
        front.indexer.index.register(Registration("a", "m", 16))
        headers = CREDENTIALS | {"X-Request-Id": "7", "Accept": "text/event-stream"}
        asked = {"model": "m", "prompt": "p"}
        where = url + "/v1/completions?api_key=k"
        async with http.post(where, json=asked, headers=headers) as response:
            assert response.status == 200
            assert await response.read()
            assert response.headers["X-Request-Id"] == "7"
            for name in "Set-Cookie", "Access-Control-Allow-Origin", "Proxy-Authenticate":
                assert name not in response.headers
        async with http.post(where, json=asked, headers=headers):
            pass
    assert len(engines["a"].seen) == 2
    for path, head in engines["a"].heads:
        assert path in ("/v1/completions", "/tokenize")
        assert not {name.lower() for name in CREDENTIALS} & {name.lower() for name in head}
    told = engines["a"].heads[-1][1]
    assert (told["X-Request-Id"], told["Accept"]) == ("7", "text/event-stream")


async def test_an_engine_is_told_the_id_that_a_request_was_given_here(http):
    engines = {"a": Engine()}
    async with routing(engines) as (url, _):
        assert (await ask(http, url))[0] == 200
    assert re.fullmatch("[0-9a-f]{24}", engines["a"].heads[-1][1]["X-Request-Id"])


async def test_engines_that_ask_for_a_key_are_given_the_operators(http):
    engines = {"a": Engine()}
    async with routing(engines, key="of engines") as (url, front):
        front.indexer.index.register(Registration("a", "m", 16))
        assert (await ask(http, url))[0] == 200
    assert len(engines["a"].heads) == 2
    assert {head["Authorization"] for _, head in engines["a"].heads} == {"Bearer of engines"}


async def test_an_engine_that_leads_elsewhere_is_not_followed(http):
    other = Engine()
    async with listening(other.application()) as elsewhere:
        engines = {"a": Engine(), "b": Engine()}
        engines["a"].leads_to = elsewhere + "/v1/completions"
        async with routing(engines) as (url, front):
            for _ in range(3):
                assert (await ask(http, url))[0] == 200
            assert len(engines["a"].seen) == 1
            assert front.router.resting(time.monotonic()) == {"a"}
    assert not other.seen


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../collective_rpc", "/v1/%2e%2e/collective_rpc", "/v1/..%2fcollective_rpc",
        "/v1/completions/..%2F..%2Fcollective_rpc", "/collective_rpc", "/v1/collective_rpc",
        "/v1/load_lora_adapter", "/v1//../reset_prefix_cache", "/v1/models/../../sleep",
        "//collective_rpc", "/v1/models/%252e%252e/%252e%252e/sleep",
    ],
)  # fmt: skip
async def test_engines_are_asked_for_nothing_else(path):
    engines = {"a": Engine()}
    async with routing(engines) as (url, _):
        for method in "GET", "POST":
            reader, writer = await asyncio.open_connection("127.0.0.1", url.rpartition(":")[2])
            head = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
            assert (await reader.read()).split()[1] in (b"400", b"404", b"405")
            writer.close()
    assert not engines["a"].seen


async def test_a_model_is_asked_for_by_its_name(http):
    engines = {"a": Engine()}
    name = "/v1/models/meta-llama/Llama-3.2:1B@x"
    async with routing(engines) as (url, _), http.get(url + name) as response:
        assert await response.text() == "done"
    assert engines["a"].seen == [name]


async def test_nobody_leads_the_front_elsewhere_by_registering(http):
    async def register(url, **where):
        async with http.post(url + "/register", json=ONE | where, headers=ADMIN) as response:
            return response.status, await response.text()

    touched = []

    async def touch(_, writer):
        touched.append(writer.get_extra_info("peername"))
        writer.close()

    async with (
        await asyncio.start_server(touch, "127.0.0.1", 0) as near,
        routing({"a": Engine()}, networks=["10.0.0.0/16"]) as (url, front),
    ):
        port = near.sockets[0].getsockname()[1]
        near_by = f"tcp://127.0.0.1:{port}"
        for endpoint in "tcp://10.1.0.1:5557", "tcp://127.1:5557", "ipc:///tmp/x", "tcp://a.b:1":
            for where in {"endpoint": endpoint}, {"endpoint": near_by, "replay_endpoint": endpoint}:
                status, text = await register(url, **where)
                assert (status, endpoint in text) == (400, True)
        assert not front.indexer.index.sources
        assert not touched
        pytest.importorskip("zmq")
        assert (await register(url, endpoint=near_by))[0] == 200
        await until_async(lambda: touched)


async def test_no_more_engines_are_followed_than_there_may_be(http, monkeypatch):
    pytest.importorskip("zmq")
    monkeypatch.setattr("serving.front.indexer_http.SUBSCRIPTIONS_MAX", 2)

    async with routing({"a": Engine()}) as (url, front):
        found = []
        for name in "a", "b", "a", "c":
            body = ONE | {"instance_id": name, "endpoint": "tcp://127.0.0.1:1"}
            async with http.post(url + "/register", json=body, headers=ADMIN) as response:
                found.append(response.status)
        assert found == [200, 200, 200, 429]
        assert len(front.indexer.index.sources) == 2
