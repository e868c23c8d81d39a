"""A client that goes away while its request is queued, computed, moved or answered.

Workers and store are processes, the client has a socket. Every stage is held open by something
that cannot pass: a prompt that takes far longer than the test, a worker or a master that stands
still. So a client leaves *in* a stage, however slow the machine is. Afterwards nothing is left.
"""

import asyncio
import contextlib
import json
import signal
from urllib.parse import urlsplit

import pytest

from serving.conductor import fleet
from serving.system import ServingSystem, SystemSettings
from tests.soak.serving import left_over
from tests.waiting import until_async

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(300)]

# Many layers for small blocks: slow, but for its memory, and quick to notice a cancel.
MODEL = "nano,layers=24,context_max=8192"
WORKER = {"block_tokens": 8, "chunk_tokens": 8, "kv_blocks": 4000, "store_deadline_ms": 100_000}
WAIT_S = 60.0


class Client:
    """A client of one request: a socket, and what came over it."""

    def __init__(self, reader, writer):
        self._reader = reader
        self._writer = writer

    async def first_token(self):
        """Wait for the headers: they come with it, whether or not it is whole characters."""
        async with asyncio.timeout(WAIT_S):
            assert b" 200 " in await self._reader.readline()

    async def pieces(self, count):
        """Wait for so many pieces of the answer's text."""
        async with asyncio.timeout(WAIT_S):
            while count:
                line = await self._reader.readline()
                assert line, "the server closed the connection"
                count -= line.startswith(b"data: ")

    def leave(self):
        """Go away without a word."""
        self._writer.transport.abort()


class Stage:
    """A running system and its clients."""

    def __init__(self, system):
        self.system = system
        clients = [
            system.conductor.fleet.members[address].client for address in system.workers.addresses
        ]
        self.prefill, self.decode = clients[0], clients[-1]
        self.clients = []

    async def ask(self, tokens, new):
        """Send a request for a stream."""
        url = urlsplit(self.system.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        client = Client(reader, writer)
        self.clients.append(client)
        prompt = [(len(self.clients) + at) % 200 for at in range(tokens)]
        body = json.dumps({"prompt": prompt, "max_tokens": new, "stream": True, "ignore_eos": True})
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write((head + body).encode())
        return client

    async def until(self, worker, condition):
        """Ask a worker how busy it is until that is so."""
        async with asyncio.timeout(WAIT_S):
            while not condition(load := await worker.load(WAIT_S)):
                pass
        return load

    async def computing(self):
        """Wait until a prompt is being computed."""
        flights = self.system.conductor.scheduler.ledger.flights
        await until_async(
            lambda: any(
                each.stage == "prefill" and each.began is not None for each in flights.values()
            ),
            WAIT_S,
        )

    async def settled(self):
        """All clients have left, and with them everything they had; all workers are there."""
        assert await left_over(self.system) == []
        members = self.system.conductor.fleet.members.values()
        await until_async(lambda: all(member.there for member in members), WAIT_S)
        assert self.system.conductor.stats.outcomes == {"cancelled": len(self.clients)}


@contextlib.asynccontextmanager
async def stage(**settings):
    given = SystemSettings(
        port=0, model=MODEL, segment="256MB", worker=WORKER, fixed_roles=True,
        ttft_s=3600.0, tbt_s=600.0, **settings,
    )  # fmt: skip
    async with ServingSystem(given) as system:
        here = Stage(system)
        try:
            yield here
        finally:
            for client in here.clients:
                client.leave()


@pytest.fixture(autouse=True)
def _who_stands_still_is_not_lost(monkeypatch):
    """A worker is stopped until a prompt is computed: that may take longer than its patience."""
    monkeypatch.setattr(fleet, "ANSWER_S", WAIT_S)


async def test_clients_leave_while_queued_computed_pushed_and_answered():
    async with stage() as here:
        # Two prompts are opened at a time; the third one waits.
        clients = []
        for count in (1, 2, 3):
            clients.append(await here.ask(8000, 100))
            await here.until(here.prefill, lambda load, count=count: load.queued == count)
        clients.pop().leave()
        await here.until(here.prefill, lambda load: load.queued == 2)
        await here.computing()
        for client in clients:
            client.leave()
        await here.settled()

        # Its KV is pushed to a worker that stands still once it has promised room: nothing is
        # computed before the promise has come.
        client = await here.ask(1500, 100)
        await here.computing()
        pushed_to = here.system.workers.children[1]
        pushed_to.signal(signal.SIGSTOP)
        try:
            await client.first_token()
            load = await here.until(here.prefill, lambda load: not load.queued)
            assert load.kv_blocks_used
            client.leave()
        finally:
            pushed_to.signal(signal.SIGCONT)
        await here.settled()

        client = await here.ask(50, 5000)
        await client.first_token()
        await client.pieces(3)
        assert (await here.decode.load(WAIT_S)).running == 1
        client.leave()
        await here.settled()


async def test_clients_leave_a_worker_that_computes_beside_answers():
    async with stage(coupled=1) as here:
        answered = await here.ask(50, 5000)
        await answered.first_token()
        await answered.pieces(3)
        clients = []
        for count in (1, 2, 3):
            clients.append(await here.ask(8000, 100))
            await here.until(here.decode, lambda load, count=count: load.queued == count)
        clients.pop().leave()
        await here.until(here.decode, lambda load: load.queued == 2)
        await here.computing()
        for client in clients:
            client.leave()
        load = await here.until(here.decode, lambda load: not load.queued)
        assert load.running == 1
        answered.leave()
        await here.settled()


async def test_a_client_leaves_while_kv_goes_to_the_pool():
    async with stage(push=False) as here:
        client = await here.ask(1500, 100)
        await here.computing()
        here.system.store.stop_master()
        try:
            await client.first_token()
            load = await here.until(here.prefill, lambda load: not load.queued)
            assert load.pending_puts
            client.leave()
        finally:
            here.system.store.resume_master()
        await here.settled()
