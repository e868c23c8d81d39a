"""Hints over HTTP, by a front with a real pool over fake workers."""

import asyncio
import contextlib

import numpy as np
import pytest
import pytest_asyncio

from mooncake_store import Client, Digests
from mooncake_store.errors import UnavailableError
from mooncake_store.local_cluster import LocalCluster
from serving.conductor.hints import HINTS_MAX
from serving.engine.tokenizer import ByteTokenizer
from tests.serving.fakes import CARD
from tests.serving.front.conftest import serving
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio

PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps."
TOKENS = ByteTokenizer().encode(PROMPT)
BLOCKS = len(TOKENS) // CARD.block_tokens


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(workers=1, segment="64MB") as cluster:
        yield cluster


@pytest.fixture
def store(cluster):
    with Client(cluster.url) as client:
        yield client
        client.clear(force=True)


@contextlib.asynccontextmanager
async def front(fleet, url):
    """(URL, conductor) of a front whose pool has been reached."""
    async with serving(fleet, pool_url=url) as (address, conductor):
        await until_async(lambda: conductor.pool.up)
        yield address, conductor


@pytest_asyncio.fixture
async def pooled(fleet, store, cluster):
    async with front(fleet, cluster.url) as (url, conductor):
        yield url, conductor.names


def keep(store, names, blocks, *, layers=CARD.layers):
    """Put the first blocks of the prompt, all their layers or the first ones."""
    digests = [names.blocks(layer, TOKENS)[:blocks] for layer in range(layers)]
    keys = Digests(np.concatenate(digests))
    store.put_many(keys, [b"x" * 64] * len(keys)).check()
    return keys


async def hint(http, url, **body):
    async with http.post(url + "/v1/hints", json={"prompt": PROMPT} | body) as response:
        return response.status, await response.json(), response.headers


def pinned(store):
    return sum(figures.soft_pinned for figures in store.store_stats())


async def test_the_blocks_of_a_prompt_are_hinted_in_all_their_layers(http, pooled, store):
    url, names = pooled
    assert BLOCKS == 4
    keys = keep(store, names, 3)
    status, body, _ = await hint(http, url, action="pin", ttl="10m", priority=2)
    assert status == 200
    assert body == {
        "object": "hint",
        "model": CARD.name,
        "action": "pin",
        "blocks": 4,
        "accepted": 3,
        "clipped": 0,
        "missing": 1,
        "rejected": 0,
        "reason": None,
        "outcomes": ["accepted", "accepted", "accepted", "missing"],
    }
    assert pinned(store) == len(keys)
    # The same prompt as tokens names the same blocks.
    _, body, _ = await hint(http, url, prompt=TOKENS, action="demote")
    assert body["outcomes"] == [
        "rejected",
        "rejected",
        "rejected",
        "missing",
    ]  # pins count for more
    assert "pin" in body["reason"]


async def test_a_block_of_which_a_layer_is_gone_is_missing(http, pooled, store):
    url, names = pooled
    keep(store, names, 3)
    lost = Digests(names.blocks(0, TOKENS)[1:2])
    store.remove_many(lost, force=True).check()
    _, body, _ = await hint(http, url, action="retain")
    assert body["outcomes"] == ["accepted", "missing", "accepted", "missing"]


async def test_a_conversation_is_hinted_as_it_was_sent(http, pooled, store):
    url, names = pooled
    messages = [{"role": "user", "content": PROMPT}]
    tokens = ByteTokenizer().chat(messages)
    keys = Digests(np.concatenate([names.blocks(layer, tokens) for layer in range(CARD.layers)]))
    store.put_many(keys, [b"x"] * len(keys)).check()
    _, body, _ = await hint(http, url, prompt=None, messages=messages, action="retain")
    assert body["accepted"] == body["blocks"] == len(tokens) // CARD.block_tokens


async def test_what_was_taken_for_less_and_what_was_not_taken_say_so(http, pooled, store):
    url, names = pooled
    keep(store, names, 2)
    _, body, _ = await hint(http, url, action="pin", ttl="1000d")
    assert body["outcomes"] == ["clipped", "clipped", "missing", "missing"]
    # There is one segment: a second replica has no place.
    _, body, _ = await hint(http, url, action="share")
    assert body["outcomes"] == ["rejected", "rejected", "missing", "missing"]
    assert body["rejected"] == 2
    assert body["reason"]


async def test_a_prompt_shorter_than_a_block_has_none(http, pooled):
    url, _ = pooled
    status, body, _ = await hint(http, url, prompt="short", action="retain")
    assert (status, body["blocks"], body["outcomes"]) == (200, 0, [])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"action": "keep"}, 400, "pin, retain, prefetch, demote, share"),
        ({}, 400, "action is missing"),
        ({"action": "pin", "ttl": "soon"}, 400, "'soon'"),
        ({"action": "pin", "priority": 9}, 400, "priority"),
        ({"action": "demote", "ttl": 5}, 400, "ttl"),
        ({"action": "pin", "tttl": 5}, 400, "tttl"),
        ({"action": "pin", "messages": []}, 400, "either"),
        ({"action": "pin", "prompt": None}, 400, "either"),
        ({"action": "pin", "prompt": [1, 999]}, 400, "between 0 and 299"),
        ({"action": "pin", "prompt": "x" * 5000}, 400, "4096 tokens"),
        ({"action": "pin", "model": "other"}, 404, "does not exist"),
    ],
)
async def test_bad_hints_are_refused_by_name(http, pooled, body, status, said):
    url, _ = pooled
    got, answer, _ = await hint(http, url, **body)
    assert got == status
    assert said in answer["error"]["message"]


async def test_without_a_pool_nobody_takes_hints(http, served):
    url, _ = served
    status, body, _ = await hint(http, url, action="retain")
    assert (status, body["error"]["code"]) == (501, "no_pool")


async def test_a_pool_that_is_away_is_said_to_be(http, fleet):
    with LocalCluster(workers=1, segment="16MB") as cluster:
        async with front(fleet, cluster.url) as (url, conductor):
            cluster.kill_master()
            await until_async(lambda: not conductor.pool.up, 30)
            status, body, headers = await hint(http, url, action="retain")
            assert (status, body["error"]["code"]) == (503, "pool_unavailable")
            assert headers["Retry-After"] == "1"


async def test_no_more_hints_are_taken_at_once_than_may_be(http, fleet, store, cluster):
    async with front(fleet, cluster.url) as (url, conductor):
        began, go_on = [], asyncio.Event()

        async def slow(*args, **options):
            began.append(args)
            await go_on.wait()
            raise UnavailableError("injected")

        answered, conductor.pool.store.hint = conductor.pool.store.hint, slow
        waiting = [asyncio.create_task(hint(http, url, action="retain")) for _ in range(HINTS_MAX)]
        await until_async(lambda: len(began) == HINTS_MAX)
        status, body, headers = await hint(http, url, action="retain")
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert headers["Retry-After"] == "1"
        go_on.set()
        assert {status for status, *_ in await asyncio.gather(*waiting)} == {503}
        conductor.pool.store.hint = answered  # those that failed are under way no more
        assert (await hint(http, url, action="retain"))[0] == 200
