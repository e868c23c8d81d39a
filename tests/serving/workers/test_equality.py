"""The same tokens however a request is served: by one worker or several, with hits or without.

Real processes. `make test-serving` runs it with 200 prompts, the default suite with fewer.
"""

import os

import pytest

from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from serving.workers.local import LocalWorkers
from tests.serving.workers.support import NANO, disaggregated, generate, prompts, tokens_of

COUNT = int(os.environ.get("MOONCAKE_TEST_PROMPTS", "16"))

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def workers(shared_store):
    with LocalWorkers(prefill=2, decode=1, pool_url=shared_store.url, **NANO) as running:
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
