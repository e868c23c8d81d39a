"""The same tokens however a request is served: by one worker or several, with hits or without.

Real processes. `make test-serving` runs it with 200 prompts, the default suite with fewer.
"""

import os

import pytest

from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from serving.workers.local import LocalWorkers
from tests.on_cuda import ON_CUDA
from tests.serving.workers.support import (
    NANO,
    decode,
    disaggregated,
    generate,
    new_id,
    prefill,
    prompts,
    tokens_of,
)

COUNT = int(os.environ.get("MOONCAKE_TEST_PROMPTS", "16"))

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_CUDA)])
def workers(request, shared_store):
    settings = NANO | {"device": request.param, "exact": True}
    with LocalWorkers(prefill=2, decode=1, pool_url=shared_store.url, **settings) as running:
        yield running


async def test_tokens_are_the_same_in_every_mode(workers, store):
    first, second, third = (WorkerClient(address) for address in workers.addresses)
    given = prompts(COUNT, seed=21, longest=400)
    samplings = [
        p.Sampling(temperature=0.9, top_p=0.9, seed=at) if at % 2 else p.Sampling()
        for at in range(COUNT)
    ]
    different = set()
    try:
        for prompt, sampling in zip(given, samplings, strict=True):
            same = {"count": 12, "sampling": sampling}
            alone = await generate(first, prompt, use_pool=False, store=False, **same)
            expected = tokens_of(alone)
            assert alone[-1].reason == "length"
            different.add(tuple(expected))
            served = {
                "disaggregated, pushed": await disaggregated(
                    second, third, prompt, push=True, use_pool=False, store=False, **same
                ),
                "disaggregated through the pool": await disaggregated(first, third, prompt, **same),
                "with hits": await disaggregated(second, third, prompt, **same),
                "with hits, on one worker": tokens_of(await generate(third, prompt, **same)),
                "pipeline": await disaggregated(
                    first, third, prompt, group=(second.address,), use_pool=False, **same
                ),
                "pipeline with hits, pushed": await disaggregated(
                    second, third, prompt, group=(first.address,), push=True, **same
                ),
            }
            assert dict.fromkeys(served, expected) == served
        await first.set_role("decode")
        await third.set_role("prefill")
        for prompt, sampling in zip(given, samplings, strict=True):
            same = {"count": 12, "sampling": sampling}
            expected = tokens_of(
                await generate(second, prompt, use_pool=False, store=False, **same)
            )
            assert await disaggregated(third, first, prompt, **same) == expected
        assert len(different) > COUNT * 0.9
    finally:
        for client in (first, second, third):
            await client.close()


def likelihoods_of(events):
    out = []
    for event in events:
        if isinstance(event, p.FirstToken):
            out.append(event.likelihood)
        elif isinstance(event, p.Tokens):
            out += event.likelihoods
    return out


async def in_their_roles(first, third):
    """Another test may have changed them."""
    await first.set_role("prefill")
    await third.set_role("decode")


async def in_two_halves(first, second, prompt, *, push=False, **fields):
    """What is told of an answer's tokens by the worker that begins it and the one that goes on."""
    name, sampling = new_id(), fields.pop("sampling")
    begun = await prefill(
        first, prompt, count=8, sampling=sampling, request_id=name,
        decode_at=second.address if push else "", **fields,
    )  # fmt: skip
    (token,) = tokens_of(begun)
    rest = await decode(second, prompt, token, begun[-1].kv, sampling=sampling, request_id=name)
    return tokens_of(begun + rest), likelihoods_of(begun + rest)


async def test_likelihoods_are_the_same_in_every_mode(workers, store):
    first, second, third = (WorkerClient(address) for address in workers.addresses)
    try:
        await in_their_roles(first, third)
        for at, prompt in enumerate(prompts(4, seed=33, shortest=100, longest=300)):
            same = {"sampling": p.Sampling(temperature=at % 2, seed=at, likeliest=3)}
            alone = await generate(first, prompt, use_pool=False, store=False, **same)
            tokens, told = tokens_of(alone), likelihoods_of(alone)
            assert [len(each.tokens) for each in told] == [3] * 8
            modes = [
                await in_two_halves(second, third, prompt, push=True, store=False, **same),
                await in_two_halves(first, third, prompt, **same),
                await in_two_halves(second, third, prompt, **same),  # with hits
                await in_two_halves(first, third, prompt, group=(second.address,), **same),
            ]
            assert modes == [(tokens, told)] * 4
            # A worker that takes over is given prompt and answer so far.
            resumed = await generate(
                second, prompt + tokens[:5], count=3, use_pool=False, store=False, **same
            )
            assert tokens_of(resumed) == tokens[5:]
            for mine, theirs in zip(likelihoods_of(resumed), told[5:], strict=True):
                assert mine.tokens == theirs.tokens
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
            silent = await generate(first, prompt, use_pool=False, store=False)
            assert not any(likelihoods_of(silent))
    finally:
        for client in (first, second, third):
            await client.close()


async def test_the_token_that_ended_an_answer_is_told(workers, store):
    first, _, third = (WorkerClient(address) for address in workers.addresses)
    try:
        await in_their_roles(first, third)
        (prompt,) = prompts(1, seed=34, shortest=100, longest=100)
        tokens = tokens_of(await generate(first, prompt, use_pool=False, store=False))
        sampling = p.Sampling(likeliest=0)
        for at in (0, 4):
            end = tokens.index(tokens[at])
            fields = {"stop_tokens": (tokens[at],), "sampling": sampling}
            alone = await generate(first, prompt, **fields)
            assert tokens_of(alone) == tokens[:end]
            assert alone[-1].reason == "stop"
            assert alone[-1].last.token == tokens[at]
            assert alone[-1].last.likelihood.chosen < 0
            begun = await prefill(first, prompt, **fields)
            assert (begun[-1].last is None) == bool(end)
            assert tokens_of(begun) == tokens[: min(end, 1)]
            if end:
                rest = await decode(third, prompt, tokens[0], begun[-1].kv, **fields)
                assert rest[-1].last.token == tokens[at]
    finally:
        for client in (first, third):
            await client.close()
