"""Algorithm 1 with real workers that keep blocks: who computes, who pulls, and who has what then.

What things cost is fixed, so that decisions do not depend on the machine; blocks, events and
answers are real.
"""

import contextlib

import pytest

from mooncake_store.local_cluster import LocalCluster
from serving.conductor.conductor import Conductor
from serving.scheduling.costs import Costs
from serving.scheduling.index import POOL
from serving.scheduling.learnt import LearntPrefill, LearntTransfer
from serving.scheduling.ledger import Flight
from serving.scheduling.placement import CacheCentric
from serving.scheduling.requests import Finish, Piece, Request
from serving.scheduling.scheduler import Policies, Scheduler
from serving.scheduling.views import Slo
from serving.workers import protocol as p
from tests.serving.workers.support import fleet, generate, prompts, tokens_of
from tests.waiting import until_async

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

HOT = tuple(prompts(1, seed=71, shortest=320, longest=320)[0])
TOKEN_S = 0.01
PULL_S = 1.0


class FixedPrefill(LearntPrefill):
    def observe(self, tokens, cached, seconds):
        """Nothing is learnt."""

    def predict(self, tokens, cached):
        return TOKEN_S * (tokens - min(cached, tokens - 1))


class FixedTransfer(LearntTransfer):
    def observe(self, source, count, seconds):
        """Nothing is learnt."""

    def predict(self, source, count):
        return 1000.0 if source == POOL else PULL_S


class Noting(CacheCentric):
    """The policy, and what it chose."""

    chosen = None

    def place(self, demand, instances, costs):
        self.chosen = super().place(demand, instances, costs)
        return self.chosen


@pytest.fixture(scope="module")
def store():
    with LocalCluster(workers=1, segment="64MB") as cluster:
        yield cluster


class System:
    def __init__(self, running, conductor, policy):
        self.running = running
        self.conductor = conductor
        self.policy = policy
        self.names = [client.address for client in running.clients]
        self.requests = 0

    async def ask(self, prompt, count=4):
        """The tokens of an answer, and where its prompt was computed and pulled from."""
        self.requests += 1
        tokens, end, chosen = [], None, None
        asked = Request(f"r{self.requests}", tuple(prompt), p.Sampling(), count, deadline_s=100)
        async for outcome in self.conductor.submit(asked):
            chosen = chosen or self.policy.chosen
            if isinstance(outcome, Piece):
                tokens += outcome.tokens
            else:
                end = outcome
        assert isinstance(end, Finish), end
        return tokens, self.names.index(chosen.prefill), chosen

    def held(self, prompt):
        """How many tokens of a prompt each worker keeps, as the index has it."""
        matches = self.conductor.holdings.find(prompt).matches
        return [matches.get(name, 0) for name in self.names]

    @contextlib.contextmanager
    def queue(self, at, seconds):
        """Work of so many predicted seconds waits on a worker."""
        ledger = self.conductor.scheduler.ledger
        decode = next(name for name, each in ledger.instances.items() if each.role == "decode")
        ledger.assign(Flight("ahead", 1, 1, 0, self.names[at], decode, 0.0, seconds, seconds))
        try:
            yield
        finally:
            ledger.ended("ahead")


@contextlib.asynccontextmanager
async def system(store, balancing=1.5):
    policy = Noting(balancing)
    scheduler = Scheduler(Slo(1000.0, 1000.0), Policies(placement=policy))
    scheduler.costs = Costs(prefill=FixedPrefill(), transfer=FixedTransfer())
    async with fleet() as running:
        for role in ("prefill", "prefill", "decode"):
            own = {} if role == "prefill" else {"own_blocks": 0}
            await running.add(role, pool_url=store.url, **own)
        conductor = Conductor(scheduler, pool_url=store.url)
        await conductor.start([client.address for client in running.clients])
        try:
            await until_async(lambda: conductor.pool.up)
            yield System(running, conductor, policy)
        finally:
            await conductor.close()


def followed_by(prompt, seed):
    """A prompt that begins like this one."""
    return (*prompt, *prompts(1, seed=seed, shortest=20, longest=20)[0])


async def test_a_hot_prefix_gains_a_holder_and_loses_it_when_it_is_cold(store):
    async with system(store) as here:
        _, at, _ = await here.ask(followed_by(HOT, 1))
        assert at == 0
        await until_async(lambda: here.held(HOT)[0] == len(HOT))

        # Who has it computes little, and wins against a shorter queue.
        with here.queue(0, PULL_S / 2):
            _, at, chosen = await here.ask(followed_by(HOT, 2))
        assert (at, chosen.source, chosen.cached) == (0, "", len(HOT))
        assert here.held(HOT)[1] == 0

        # Not against one that is longer than a pull takes: then another worker has it, too.
        prompt = followed_by(HOT, 3)
        with here.queue(0, 10 * PULL_S):
            tokens, at, chosen = await here.ask(prompt)
        assert (at, chosen.source, chosen.pulled) == (1, here.names[0], len(HOT))
        alone = await generate(
            here.running.clients[2], prompt, count=4, use_pool=False, store=False
        )
        assert tokens == tokens_of(alone)
        await until_async(lambda: here.held(HOT)[1] == len(HOT))
        with here.queue(0, 10 * PULL_S):
            _, at, chosen = await here.ask(followed_by(HOT, 4))
        assert (at, chosen.source, chosen.cached) == (1, "", len(HOT))

        # Nobody asks any more. What was computed there stays, the copy does not.
        here.running.workers[1].parts.keeping.kept._copy_idle_s = 0.0
        await until_async(lambda: here.held(HOT)[1] == 0)
        assert here.held(HOT)[0] == len(HOT)


@pytest.mark.parametrize(("balancing", "pulls"), [(1.5, True), (2.0, False)])
async def test_balancing_decides_how_much_longer_a_prefix_has_to_be_to_be_pulled(
    store, balancing, pulls
):
    part = HOT[: 3 * len(HOT) // 5]
    async with system(store, balancing) as here:
        with here.queue(0, 10 * PULL_S):
            await here.ask(followed_by(part, 5))
        await until_async(lambda: here.held(HOT)[1] == len(part))
        with here.queue(1, 10 * PULL_S):
            await here.ask(followed_by(HOT, 6))
        await until_async(lambda: here.held(HOT)[0] == len(HOT))
        with here.queue(0, 10 * PULL_S):
            _, at, chosen = await here.ask(followed_by(HOT, 7))
        assert at == 1
        assert chosen.source == (here.names[0] if pulls else "")
        assert chosen.cached == (len(HOT) if pulls else len(part))
