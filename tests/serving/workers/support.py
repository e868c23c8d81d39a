"""Asking workers, and what is left behind afterwards."""

import contextlib
import itertools
import threading

from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from serving.workers.settings import settings_from
from serving.workers.worker import Worker
from tests.serving.engine.support import prompts
from tests.waiting import PATIENCE_S, until_async

# What the pool is given is no part of what most tests say: a slow machine needs more than usual.
NANO = {
    "model": "nano", "block_tokens": 16, "chunk_tokens": 64, "kv_blocks": 256,
    "fetch_deadline_ms": 30_000, "store_deadline_ms": 30_000,
}  # fmt: skip
GREEDY = p.Sampling()
DEADLINE_MS = 60_000

_ids = itertools.count()


def new_id():
    return f"request-{next(_ids)}"


def tokens_of(events):
    out = []
    for event in events:
        if isinstance(event, p.FirstToken):
            out.append(event.token)
        elif isinstance(event, p.Tokens):
            out += event.ids
    return out


def kinds(events):
    return [type(event).__name__ for event in events]


async def drain(stream):
    return [event async for event in stream]


def asking_for_room(card, name, **fields):
    """What a sender of KV asks first."""
    fields = {"tokens": 20, "max_new_tokens": 4, "senders": 1, "deadline_ms": 60_000} | fields
    return p.KVOpen(name, revision=card.revision, layout=card.layout, **fields)


async def generate(client, prompt, *, count=8, **fields):
    """All events of a monolithic answer."""
    fields.setdefault("sampling", GREEDY)
    fields.setdefault("deadline_ms", DEADLINE_MS)
    message = p.Generate(new_id(), p.pack_tokens(prompt), max_new_tokens=count, **fields)
    return await drain(client.generate(message))


async def prefill(client, prompt, *, count=8, request_id=None, **fields):
    fields.setdefault("sampling", GREEDY)
    fields.setdefault("deadline_ms", DEADLINE_MS)
    message = p.Prefill(
        request_id or new_id(), p.pack_tokens(prompt), max_new_tokens=count, **fields
    )
    return await drain(client.prefill(message))


async def decode(client, prompt, first, kv, *, count=8, request_id=None, **fields):
    fields.setdefault("sampling", GREEDY)
    fields.setdefault("deadline_ms", DEADLINE_MS)
    message = p.Decode(
        request_id or new_id(), p.pack_tokens(prompt), first, max_new_tokens=count, kv=kv, **fields
    )
    return await drain(client.decode(message))


async def disaggregated(first, second, prompt, *, count=8, sampling=GREEDY, push=False, **fields):
    """Tokens of an answer that one worker begins and another goes on with."""
    name = new_id()
    events = await prefill(
        first, prompt, count=count, sampling=sampling, request_id=name,
        decode_at=second.address if push else "", **fields,
    )  # fmt: skip
    assert isinstance(events[-1], p.Done), events
    assert events[-1].kv.pushed == push
    out = tokens_of(events)
    if events[-1].stopped:
        return out
    rest = await decode(
        second, prompt, out[0], events[-1].kv, count=count, sampling=sampling, request_id=name
    )
    assert isinstance(rest[-1], p.Finished), rest
    return out + tokens_of(rest)


@contextlib.contextmanager
def held(worker):
    """Hold what computes between two steps."""
    reached, go = threading.Event(), threading.Event()

    def hold():
        reached.set()
        go.wait(PATIENCE_S)

    worker.parts.computing.post(hold)
    assert reached.wait(PATIENCE_S)
    try:
        yield worker.parts.computing
    finally:
        go.set()


async def cancelled_at(client, stream, kind):
    """Leave a stream at its first event of a kind."""
    seen = []
    async for event in stream:
        seen.append(type(event))
        if isinstance(event, kind):
            break
    await stream.aclose()
    assert seen[-1] is kind, f"the stream ended without {kind.__name__}: {seen}"


class Fleet:
    """Workers of one test in its own event loop, with a client each."""

    def __init__(self):
        self.workers = []
        self.clients = []

    async def add(self, role="prefill", **settings):
        worker = Worker(settings_from({**NANO, "role": role, **settings}))
        self.workers.append(worker)
        self.clients.append(WorkerClient(await worker.start()))
        return self.clients[-1]

    async def stored(self):
        """Wait until all that was computed is in the pool."""
        for client in self.clients:
            while (await client.load()).pending_puts:
                pass

    def engine(self, at):
        return self.workers[at].parts.computing.engine

    async def settled(self):
        """Wait until nothing runs, then say that nothing was left behind."""
        for at, worker in enumerate(self.workers):
            engine = self.engine(at)
            await until_async(
                lambda w=worker, e=engine: not w._active and not e.cache.used,
                what=f"{worker.settings.worker_id} holds {engine.cache.used} blocks",
            )
            engine.cache.check_integrity([])
            assert not engine.waiting
            assert not engine.opened
            assert not engine.running
            assert not worker._receiving._incoming
            assert not worker._stages
            assert worker.parts.pool.pending == 0

    async def close(self):
        for client in self.clients:
            await client.close()
        for worker in self.workers:
            await worker.stop()


@contextlib.asynccontextmanager
async def fleet():
    running = Fleet()
    try:
        yield running
        await running.settled()
    finally:
        await running.close()


__all__ = [
    "Fleet", "asking_for_room", "cancelled_at", "decode", "disaggregated", "fleet", "generate",
    "held", "kinds", "new_id", "prefill", "prompts", "tokens_of",
]  # fmt: skip
