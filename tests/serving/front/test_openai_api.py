"""The OpenAI API over fake workers: answers, streams, and every kind of bad input."""

import asyncio
import io
import json
import logging
import re

import aiohttp
import pytest

from serving.engine.tokenizer import ByteTokenizer
from serving.workers import protocol as p
from tests.serving.fakes import CARD, Fleet, answer
from tests.serving.front.conftest import serving
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio

TOKENIZER = ByteTokenizer()
PROMPT = "The quick brown fox jumps over the lazy dog."


def text_after(prompt, count):
    return TOKENIZER.decode(answer(TOKENIZER.encode(prompt), count))


async def post(http, url, path="/v1/completions", **body):
    async with http.post(url + path, json={"prompt": PROMPT} | body) as response:
        return response.status, await response.json(), response.headers


async def events(response):
    """The data of a stream, parsed; the end mark as it is."""
    found = []
    async for line in response.content:
        if line.startswith(b"data: "):
            raw = line[6:].strip()
            found.append("[DONE]" if raw == b"[DONE]" else json.loads(raw))
    return found


async def test_a_completion(http, served):
    url, _ = served
    status, body, _ = await post(http, url, max_tokens=6)
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == text_after(PROMPT, 6)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 45,
        "completion_tokens": 6,
        "total_tokens": 51,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_request_is_known_to_its_workers_by_the_id_that_it_came_with(
    http, served, fleet, caplog
):
    url, _ = served
    caplog.set_level(logging.INFO, "mooncake_store.program.shell")
    headers = {"X-Request-Id": "one-of/mine"}
    for _ in range(2):
        async with http.post(
            url + "/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}, headers=headers
        ) as response:
            body = await response.json()
            assert response.headers["X-Request-Id"] == "one-of/mine"
    seen = [each.request_id for worker in fleet.prefill + fleet.decode for each in worker.seen]
    assert all(each.startswith("one-of/mine/cmpl-") for each in seen)
    assert any(each.startswith(f"one-of/mine/{body['id']}") for each in seen)
    lines = [record for record in caplog.records if record.name == "mooncake_store.program.shell"]
    assert [line.getMessage() for line in lines] == ["POST /v1/completions: 200"] * 2
    assert all(line.elapsed_s > 0 for line in lines)


async def test_one_without_an_id_that_can_be_told_is_given_one(http, served, fleet):
    url, _ = served
    given = [{}, {}, {"X-Request-Id": "a b"}, {"X-Request-Id": "a" * 129}]
    names = []
    for number, headers in enumerate(given):
        body = {"prompt": PROMPT, "stream": number % 2 == 0}
        async with http.post(url + "/v1/completions", json=body, headers=headers) as response:
            names.append(response.headers["X-Request-Id"])
    assert len(set(names)) == 4
    assert all(re.fullmatch("[0-9a-f]{24}", name) for name in names)
    seen = {each.request_id.partition("/")[0] for worker in fleet.prefill for each in worker.seen}
    assert seen == set(names)


async def test_tokens_as_a_prompt_and_sixteen_tokens_by_default(http, served):
    url, _ = served
    tokens = [1, 2, 3]
    _, body, _ = await post(http, url, prompt=tokens)
    assert body["choices"][0]["text"] == TOKENIZER.decode(answer(tokens, 16))


async def test_a_chat(http, served):
    url, _ = served
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    status, body, _ = await post(
        http, url, "/v1/chat/completions", messages=messages, max_completion_tokens=4
    )
    assert status == 200
    prompt = TOKENIZER.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    expected = TOKENIZER.decode(answer(prompt, 4))
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": expected, "refusal": None,
    }  # fmt: skip


async def test_a_stream_says_the_same_piece_by_piece(http, served):
    url, _ = served
    body = {"prompt": PROMPT, "max_tokens": 6, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with http.post(url + "/v1/completions", json=body) as response:
        assert response.content_type == "text/event-stream"
        found = await events(response)
    assert found[-1] == "[DONE]"
    *pieces, usage = found[:-1]
    assert "".join(each["choices"][0]["text"] for each in pieces) == text_after(PROMPT, 6)
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert len(pieces) > 3


async def test_several_choices_are_draws_of_their_own(http, served, fleet):
    url, conductor = served
    _, body, _ = await post(http, url, max_tokens=5, n=3, temperature=1.0, seed=(1 << 63) - 2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in body["choices"]} == {text_after(PROMPT, 5)}
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["prompt_tokens"] == 45
    assert body["usage"]["completion_tokens"] == 15
    seen = [message for worker in fleet.prefill for message in worker.seen]
    assert sorted(message.sampling.seed for message in seen) == [0, (1 << 63) - 2, (1 << 63) - 1]
    assert len({message.request_id for message in seen}) == 3
    assert conductor.stats.outcomes == {"length": 3}


async def test_choices_begin_when_the_first_has_a_token_and_end_together(http, served, fleet):
    url, conductor = served
    held = [worker.holding("prefill") for worker in fleet.prefill]
    asked = asyncio.ensure_future(post(http, url, max_tokens=5, n=4))
    await until_async(lambda: any(reached.is_set() for reached, _ in held))
    assert conductor.under_way == 1
    tokens = [worker.holding("token 0") for worker in fleet.decode]
    for _, go in held:
        go.set()
    await until_async(lambda: conductor.under_way == 4)
    for _, go in tokens:
        go.set()
    status, body, _ = await asked
    assert (status, len(body["choices"])) == (200, 4)


async def test_a_chat_streams_several_choices(http, served):
    url, _ = served
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 6, "stream": True, "n": 2}
    body["stream_options"] = {"include_usage": True}
    async with http.post(url + "/v1/chat/completions", json=body) as response:
        found = await events(response)
    assert found.pop() == "[DONE]"
    assert found.pop()["usage"]["completion_tokens"] == 12
    expected = TOKENIZER.decode(answer(TOKENIZER.chat(messages), 6))
    for number in range(2):
        mine = [each["choices"][0] for each in found if each["choices"][0]["index"] == number]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"].get("content", "") for each in mine) == expected
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == ["length"]
    assert len(found) == sum(each["choices"][0]["index"] in (0, 1) for each in found)


async def test_where_the_first_choice_is_refused_the_others_do_not_begin(http, served):
    url, conductor = served
    conductor.requests_max = 0
    status, _, _ = await post(http, url, max_tokens=5, n=3)
    assert status == 429
    assert conductor.stats.outcomes == {"queue_full": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_fails_ends_them_all(http, served, fleet, stream):
    url, conductor = served
    conductor.requests_max = 2
    asked = {"max_tokens": 400, "n": 3, "stream": stream}
    if not stream:
        status, body, headers = await post(http, url, **asked)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert headers["Retry-After"] == "1"
    else:
        async with http.post(url + "/v1/completions", json={"prompt": PROMPT} | asked) as response:
            found = await events(response)
        assert found[-1] == "[DONE]"
        assert found[-2]["error"]["code"] == "queue_full"
    await until_async(lambda: fleet.idle() and not conductor.under_way)


async def test_a_stop_string_ends_the_answer_and_the_work(http, served, fleet):
    url, conductor = served
    whole = text_after(PROMPT, 40)
    stop = whole[5:8]
    _, body, _ = await post(http, url, max_tokens=400, stop=["never", stop])
    assert body["choices"][0]["text"] == whole[: whole.index(stop)]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] < 20
    assert conductor.stats.outcomes == {"stop": 1}
    await until_async(fleet.idle)


async def test_sampling_and_priority_reach_the_worker(http, served, fleet):
    url, _ = served
    await post(http, url, temperature=0.5, top_p=0.9, top_k=7, seed=11, priority=3, max_tokens=2)
    (message,) = [m for worker in fleet.prefill for m in worker.seen]
    assert message.sampling == p.Sampling(0.5, 0.9, 7, 11)
    assert message.priority == 3
    assert message.stop_tokens == (257,)
    await post(http, url, max_tokens=2, ignore_eos=True)
    seen = [m for worker in fleet.prefill for m in worker.seen]
    assert {m.stop_tokens for m in seen} == {(257,), ()}
    assert len({m.sampling.seed for m in seen}) == 2


async def test_models(http, served):
    url, _ = served
    async with http.get(url + "/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["max_model_len"]) == ("fake", 4096)
    async with http.get(url + "/v1/models/fake") as response:
        assert (await response.json())["id"] == "fake"
    async with http.get(url + "/v1/models/other") as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", {"model": "gpt-9"}, 404, "model", "model_not_found"),
        ("/v1/completions", {"max_tokens": 5000}, 400, "max_tokens", "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x" * 5000}, 400, "max_tokens", "context_length_exceeded"),
        ("/v1/completions", {"prompt": ""}, 200, None, None),
        ("/v1/completions", {"prompt": []}, 400, "prompt", None),
        ("/v1/completions", {"prompt": [1, -1]}, 400, "prompt", None),
        ("/v1/completions", {"prompt": [1, 300]}, 400, "prompt", None),
        ("/v1/completions", {"prompt": {"a": 1}}, 400, "prompt", None),
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "prompt", None),
        ("/v1/completions", {"max_tokens": 0}, 400, "max_tokens", None),
        ("/v1/completions", {"max_tokens": True}, 400, "max_tokens", None),
        ("/v1/completions", {"temperature": 3}, 400, "temperature", None),
        ("/v1/completions", {"temperature": "hot"}, 400, "temperature", None),
        ("/v1/completions", {"top_p": 0}, 400, "top_p", None),
        ("/v1/completions", {"stop": [""]}, 400, "stop", None),
        ("/v1/completions", {"stop": ["x"] * 17}, 400, "stop", None),
        ("/v1/completions", {"seed": "x"}, 400, "seed", None),
        ("/v1/completions", {"stream": 1}, 400, "stream", None),
        ("/v1/completions", {"stream_options": []}, 200, None, None),
        ("/v1/completions", {"stream_options": 3}, 400, "stream_options", None),
        ("/v1/completions", {"timeout": 1e9}, 400, "timeout", None),
        ("/v1/completions", {"priority": 1 << 40}, 400, "priority", None),
        ("/v1/completions", {"n": 0}, 400, "n", None),
        ("/v1/completions", {"n": 17}, 400, "n", None),
        ("/v1/chat/completions", {"messages": []}, 400, "messages", None),
        ("/v1/chat/completions", {"messages": ["hi"]}, 400, "messages[0]", None),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0]", None),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0]",
            None,
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]},
            400,
            "tools",
            None,
        ),
    ],
)
async def test_bad_requests_name_the_field(http, served, path, body, status, param, code):
    url, conductor = served
    found, answered, _ = await post(http, url, path, **body)
    assert found == status
    if status != 200:
        error = answered["error"]
        assert (error["param"], error["code"]) == (param, code)
        assert error["message"]
        if code is None:
            assert param in error["message"]
        assert conductor.under_way == 0


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000])
async def test_what_is_no_json_object_is_refused(http, served, raw):
    url, _ = served
    kind = {"Content-Type": "application/json"}
    async with http.post(url + "/v1/completions", data=raw, headers=kind) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_body_without_end_is_refused(http, served):
    url, _ = served
    body, kind = io.BytesIO(b"x" * (17 << 20)), {"Content-Type": "application/json"}
    async with http.post(url + "/v1/completions", data=body, headers=kind) as response:
        assert response.status == 413
        assert "error" in await response.json()


async def test_unknown_paths_and_methods_answer_in_openais_shape(http, served):
    url, _ = served
    async with http.get(url + "/v1/nothing") as response:
        assert response.status == 404
        assert "error" in await response.json()
    async with http.get(url + "/v1/completions") as response:
        assert response.status == 405


async def test_overload_is_a_429_with_retry_after(http, fleet):
    async with serving(fleet) as (url, _):
        for worker in fleet.decode:
            worker.fail["admission"] = p.Refused("too many run", 2500)
        status, body, headers = await post(http, url, max_tokens=5)
        assert status == 429
        assert headers["Retry-After"] == "3"
        assert body["error"]["type"] == "rate_limit_error"
        assert "too many run" in body["error"]["message"]


async def test_a_failure_before_the_first_token_of_a_stream_has_its_own_status(http, fleet):
    async with serving(fleet) as (url, _):
        for worker in fleet.prefill:
            worker.fail["prefill"] = p.Failed("too_long", "too long for this worker")
        status, body, _ = await post(http, url, stream=True)
        assert status == 400
        assert body["error"]["code"] == "too_long"


async def test_a_failure_later_in_a_stream_is_an_event(http, fleet):
    async with serving(fleet) as (url, _):
        for worker in fleet.decode:
            worker.fail["token 1"] = p.Failed("deadline", "its time ran out")
        async with http.post(
            url + "/v1/completions", json={"prompt": PROMPT, "stream": True}
        ) as response:
            assert response.status == 200
            found = await events(response)
    assert found[-2]["error"]["code"] == "deadline"
    assert found[-1] == "[DONE]"


async def test_no_workers_is_a_503(http):
    async with serving(Fleet(0, 0)) as (url, _):
        status, body, _ = await post(http, url)
        assert (status, body["error"]["code"]) == (503, "no_workers")
        async with http.get(url + "/health") as response:
            assert response.status == 503
            assert (await response.json())["workers"] == {"prefill": 0, "decode": 0}


@pytest.mark.parametrize("stage", ["prefill", "transfer", "admission", "token 2"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_request(fleet, stage, stream):
    async with serving(fleet) as (url, conductor), aiohttp.ClientSession() as http:
        holds = [worker.holding(stage)[0] for worker in fleet.workers.values()]
        body = {"prompt": PROMPT, "stream": stream}

        async def ask():
            async with http.post(url + "/v1/completions", json=body) as response:
                await response.read()

        asking = asyncio.create_task(ask())
        await until_async(lambda: any(reached.is_set() for reached in holds))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await http.close()
        await until_async(lambda: fleet.idle() and not conductor.under_way)
        assert any(worker.cancelled for worker in fleet.workers.values())
        assert not conductor.scheduler.ledger.flights


async def test_a_token_is_asked_for_where_one_is_set(http, fleet):
    async with serving(fleet, token="secret") as (url, _):
        status, body, _ = await post(http, url)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        headers = {"Authorization": "Bearer secret"}
        async with http.get(url + "/v1/models", headers=headers) as response:
            assert response.status == 200
        async with http.get(url + "/health") as response:
            assert response.status == 200


async def test_metrics_and_stats_tell_what_happened(http, served):
    url, _ = served
    await post(http, url, max_tokens=5)
    await post(http, url, model="other")
    async with http.get(url + "/metrics") as response:
        text = await response.text()
    assert 'mooncake_serving_requests_total{outcome="length"} 1.0' in text
    assert "mooncake_serving_generated_tokens_total 5.0" in text
    assert "mooncake_serving_ttft_seconds_count 1.0" in text
    assert 'mooncake_serving_workers{role="prefill"} 2.0' in text
    assert 'mooncake_serving_prefix_tokens_total{source="computed"} 45.0' in text
    assert 'mooncake_serving_stage_requests{stage="decode"} 0.0' in text
    assert 'mooncake_serving_slo_seconds{of="tbt"} 0.1' in text
    assert re.search(r'mooncake_serving_stage_seconds_total{stage="decode"} [0-9.e-]+\n', text)
    async with http.get(url + "/stats") as response:
        stats = await response.json()
    assert stats["ended"]["answered"] == {"length": 1}
    assert stats["requests"][0]["generated_tokens"] == 5
    assert {worker["state"] for worker in stats["workers"]} == {"there"}
    assert stats["health"]["store"] == "none: nothing is reused"
    assert stats["costs"]["kv_bytes"] == CARD.kv_bytes_per_token
    assert stats["costs"]["prefill"]["measured"] == 1
    assert len(stats["costs"]["decode"]["coefficients"]) == 4
    assert stats["machine"] == {"layers": CARD.layers, "kv_tokens": 256 * CARD.block_tokens}
