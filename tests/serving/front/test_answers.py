"""Probabilities and ends of answers over fake workers, as OpenAI's and vLLM's users know them."""

import json

import pytest

from serving.engine.tokenizer import ByteTokenizer, WordTokenizer
from serving.workers import protocol as p
from tests.serving.fakes import CARD, answer, likelihoods
from tests.serving.front.conftest import serving
from tests.serving.front.test_openai_api import PROMPT, events, post, text_after

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.asyncio

TOKENIZER = ByteTokenizer()
TOKENS = TOKENIZER.encode(PROMPT)
MESSAGES = [{"role": "user", "content": "Hi"}]


def expected(tokens, count, likeliest):
    """(token, likelihood) of an answer to these tokens."""
    tokens, found = list(tokens), []
    for token in answer(tokens, count):
        (told,) = likelihoods(tokens, p.Sampling(likeliest=likeliest))
        found.append((token, told))
        tokens.append(token)
    return found


def client_of(url):
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=20, max_retries=0)


async def test_logprobs_of_a_completion_have_openais_columns(served):
    url, _ = served
    async with client_of(url) as client:
        asked = {"model": "fake", "prompt": PROMPT, "max_tokens": 6, "logprobs": 3}
        whole = (await client.completions.create(**asked)).choices[0]
        columns = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        text = ""
        async for piece in await client.completions.create(**asked, stream=True):
            text += piece.choices[0].text
            for name, values in columns.items():
                values += getattr(piece.choices[0].logprobs, name, [])
    wanted = expected(TOKENS, 6, 3)
    assert whole.logprobs.tokens == [chr(token) for token, _ in wanted]
    assert whole.logprobs.token_logprobs == [told.chosen for _, told in wanted]
    assert whole.logprobs.text_offset == list(range(6))
    assert whole.logprobs.top_logprobs == [
        {chr(token): logprob for token, logprob in zip(told.tokens, told.logprobs, strict=True)}
        for _, told in wanted
    ]
    assert "".join(whole.logprobs.tokens) == whole.text == text
    assert columns == whole.logprobs.model_dump()


async def test_logprobs_of_a_chat_have_an_entry_for_each_token(served):
    url, _ = served
    async with client_of(url) as client:
        asked = {"model": "fake", "messages": MESSAGES, "max_tokens": 5, "logprobs": True}
        whole = (await client.chat.completions.create(**asked, top_logprobs=2)).choices[0]
        pieces = []
        async for piece in await client.chat.completions.create(
            **asked, top_logprobs=2, stream=True
        ):
            if piece.choices[0].logprobs is not None:
                pieces += piece.choices[0].logprobs.content
        alone = (await client.chat.completions.create(**asked)).choices[0]
    wanted = expected(TOKENIZER.chat(MESSAGES), 5, 2)
    assert [entry.model_dump() for entry in whole.logprobs.content] == [
        {
            "token": chr(token),
            "bytes": [token],
            "logprob": told.chosen,
            "top_logprobs": [
                {"token": chr(each), "bytes": [each], "logprob": logprob}
                for each, logprob in zip(told.tokens, told.logprobs, strict=True)
            ],
        }
        for token, told in wanted
    ]
    assert pieces == whole.logprobs.content
    assert [entry.top_logprobs for entry in alone.logprobs.content] == [[]] * 5
    assert [entry.logprob for entry in alone.logprobs.content] == [t.chosen for _, t in wanted]


async def test_the_chosen_token_is_told_beside_the_likeliest(served):
    url, _ = served
    async with client_of(url) as client:
        asked = {"model": "fake", "prompt": PROMPT, "max_tokens": 2}
        none = (await client.completions.create(**asked, logprobs=0)).choices[0].logprobs
    wanted = expected(TOKENS, 2, 0)
    assert none.top_logprobs == [{chr(token): told.chosen} for token, told in wanted]


async def test_who_asks_for_no_logprobs_has_none_sent(http, served, fleet):
    url, _ = served
    _, body, _ = await post(http, url, max_tokens=3)
    assert body["choices"][0]["logprobs"] is None
    _, body, _ = await post(http, url, "/v1/chat/completions", messages=MESSAGES, logprobs=False)
    assert body["choices"][0]["logprobs"] is None
    assert {m.sampling.likeliest for worker in fleet.workers.values() for m in worker.seen} == {-1}
    plain = p.LISTEN.reply.pack(p.Events((("r", (p.Tokens((5,)),)),)))
    told = p.Tokens((5,), (p.Likelihood(-0.5),))
    assert len(plain) < len(p.LISTEN.reply.pack(p.Events((("r", (told,)),)))) - 8


async def test_an_answer_that_goes_on_elsewhere_has_the_same_logprobs(http, served, fleet):
    url, conductor = served
    asked = {"max_tokens": 8, "logprobs": 5}
    _, undisturbed, _ = await post(http, url, **asked)
    for worker in fleet.decode:
        worker.fail["token 3"] = p.Failed("internal", "broken", retryable=True)
    _, resumed, _ = await post(http, url, **asked)
    assert conductor.stats.resumed >= 1
    assert resumed["choices"] == undisturbed["choices"]
    _, several, _ = await post(http, url, **asked, n=3)
    for choice in several["choices"]:
        assert choice["logprobs"] == undisturbed["choices"][0]["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_stop_string_that_is_not_shown_no_tokens_are_listed(http, served, stream):
    url, _ = served
    whole = text_after(PROMPT, 40)
    asked = {"max_tokens": 400, "stop": whole[5:8], "logprobs": 1, "stream": stream}
    for shown in (False, True):
        body = {"prompt": PROMPT, "include_stop_str_in_output": shown} | asked
        async with http.post(url + "/v1/completions", json=body) as response:
            if stream:
                choices = [event["choices"][0] for event in (await events(response))[:-1]]
            else:
                choices = (await response.json())["choices"]
        end = whole.index(whole[5:8]) + 3 * shown
        listed = [token for c in choices if c["logprobs"] for token in c["logprobs"]["tokens"]]
        assert "".join(listed) == "".join(choice["text"] for choice in choices) == whole[:end]
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", whole[5:8])


async def test_usage_counts_the_tokens_up_to_the_stop_string(http, served):
    url, _ = served
    whole = text_after(PROMPT, 40)
    end = whole.index(whole[5:8]) + 3
    _, body, _ = await post(http, url, max_tokens=400, stop=whole[5:8])
    assert body["usage"]["completion_tokens"] == end


@pytest.mark.parametrize("at", [0, 6])
@pytest.mark.parametrize("shown", [False, True])
async def test_a_stop_token_ends_an_answer_and_is_its_reason(http, served, at, shown):
    url, conductor = served
    tokens = answer(TOKENS, 40)
    stop = tokens[at]
    end = tokens.index(stop)
    asked = {"stop_token_ids": [255, stop], "include_stop_str_in_output": shown, "logprobs": 0}
    _, body, _ = await post(http, url, max_tokens=400, **asked)
    choice = body["choices"][0]
    assert choice["text"] == TOKENIZER.decode(tokens[: end + shown])
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert body["usage"]["completion_tokens"] == end + shown
    assert conductor.stats.outcomes == {"stop": 1}


async def test_an_end_that_nobody_named_has_no_stop_reason(http, fleet):
    async with serving(fleet) as (url, conductor):
        tokens = answer(TOKENS, 40)
        card = conductor.fleet.card
        conductor.fleet.card = p.ModelCard(
            **{name: getattr(card, name) for name in card.__struct_fields__} | {"eos": (tokens[4],)}
        )
        end = tokens.index(tokens[4])
        _, body, _ = await post(http, url, max_tokens=40)
        choice = body["choices"][0]
        assert choice["text"] == TOKENIZER.decode(tokens[:end])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        _, body, _ = await post(http, url, max_tokens=40, ignore_eos=True)
        assert body["choices"][0]["text"] == TOKENIZER.decode(tokens)
        _, body, _ = await post(
            http, url, max_tokens=40, ignore_eos=True, stop_token_ids=[tokens[4]]
        )
        assert body["choices"][0]["stop_reason"] == tokens[4]


async def test_before_min_tokens_nothing_ends_an_answer(http, served, fleet):
    url, _ = served
    whole = text_after(PROMPT, 60)
    letter = whole[2]
    asked = {"max_tokens": 60, "stop": letter, "min_tokens": 10, "stop_token_ids": [0]}
    _, body, _ = await post(http, url, **asked)
    again = whole.find(letter, 10)
    assert body["choices"][0]["text"] == (whole[:again] if again >= 0 else whole)
    message = fleet.prefill[0].seen[-1] if fleet.prefill[0].seen else fleet.prefill[1].seen[-1]
    assert message.sampling.banned == (*CARD.eos, 0)
    assert message.sampling.banned_before == len(TOKENS) + 10


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"logprobs": 6}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/completions", {"logprobs": 2, "echo": True}, "echo"),
        ("/v1/completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"stop_token_ids": [300]}, "stop_token_ids"),
        ("/v1/completions", {"stop_token_ids": [-1]}, "stop_token_ids"),
        ("/v1/completions", {"stop_token_ids": 7}, "stop_token_ids"),
        ("/v1/completions", {"min_tokens": 17}, "min_tokens"),
        ("/v1/completions", {"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ("/v1/chat/completions", {"logprobs": 5}, "logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 5}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_what_is_wrong_with_them_is_named(http, served, path, fields, param):
    url, conductor = served
    status, body, _ = await post(http, url, path, messages=MESSAGES, **fields)
    assert (status, body["error"]["param"]) == (400, param), json.dumps(body)
    assert param in body["error"]["message"]
    assert not conductor.under_way


FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "boolean"}}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("wanted", "form"),
    [
        ({"type": "text"}, ""),
        ({"type": "json_object"}, '{"type":"object"}'),
        (FORM, '{"type":"boolean"}'),
    ],
)
async def test_the_form_of_an_answer_reaches_the_workers(http, served, fleet, path, wanted, form):
    """Both of them, and with where the answer begins."""
    url, _ = served
    asked = {"response_format": wanted, "max_tokens": 2, "messages": MESSAGES}
    status, body, _ = await post(http, url, path, **asked)
    assert status == 200, body
    prompt = body["usage"]["prompt_tokens"]
    seen = [message for worker in fleet.workers.values() for message in worker.seen]
    assert len(seen) == 2
    expected = (form, prompt if form else 0)
    assert {(m.sampling.form, m.sampling.form_from) for m in seen} == {expected}


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"type": "yaml"}, "yaml"),
        ({"type": "json_schema"}, "json_schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"pattern": "a"}}}, "pattern"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, "ref"),
        ("json_object", "response_format"),
    ],
)
async def test_a_form_that_cannot_be_kept_to_is_refused(http, served, wanted, named):
    url, conductor = served
    status, body, _ = await post(http, url, response_format=wanted)
    assert (status, body["error"]["param"]) == (400, "response_format"), body
    assert named in body["error"]["message"]
    assert not conductor.under_way


async def test_a_model_of_words_is_asked_for_no_json(http, fleet):
    async with serving(fleet, tokenizer=WordTokenizer()) as (url, _):
        status, body, _ = await post(http, url, response_format={"type": "json_object"})
    assert (status, body["error"]["param"]) == (400, "response_format")
