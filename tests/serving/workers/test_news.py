"""What a worker tells of requests: together, in order, bounded, and that it is still there."""

import asyncio

import pytest

from serving.workers import client as client_module
from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from serving.workers.news import News, Telling
from tests.serving.workers.support import fleet, generate, kinds, new_id, prompts, tokens_of
from tests.waiting import until_async
from transfer_engine.errors import TransferTimeoutError
from transfer_engine.rpc import aio

pytestmark = pytest.mark.asyncio

PROMPTS = prompts(8, seed=51, shortest=20, longest=60)


class Reader:
    """A connection in the hands of a test; what it was sent, unpacked."""

    def __init__(self):
        self.writable = True
        self.told = []

    def on_writable(self, callback):
        self.resume = callback

    def send(self, frame, body):
        self.told.append(p.LISTEN.reply.unpack(body).told)


def tokens(*ids):
    return p.Tokens(ids, tuple(p.Likelihood(0.5 * each) for each in ids))


async def test_what_comes_together_leaves_together():
    reader = Reader()
    news = News(asyncio.get_running_loop(), reader, None)
    news.add("a", p.Started(0))
    news.add("b", tokens(1))
    news.add("a", tokens(2))
    await until_async(lambda: reader.told)
    assert reader.told == [(("a", (p.Started(0), tokens(2))), ("b", (tokens(1),)))]


async def test_a_reader_that_is_slow_gets_fewer_events_and_all_tokens():
    reader = Reader()
    news = News(asyncio.get_running_loop(), reader, None)
    reader.writable = False
    news.add("a", p.Admitted(0))
    for each in range(100):
        news.add("a", tokens(each))
        await asyncio.sleep(0)
    news.add("a", p.Finished("length", {}))
    news.beat(0.0)
    await asyncio.sleep(0)
    assert reader.told == []
    await until_async(lambda: news.stuck_s > 0.01)
    reader.writable = True
    reader.resume()
    assert reader.told == [(("a", (p.Admitted(0), tokens(*range(100)), p.Finished("length", {}))),)]
    news.beat(0.0)
    assert reader.told[1:] == [()]
    news.beat(3600.0)
    assert len(reader.told) == 2


async def test_thousands_of_requests_are_told_of_in_several_frames():
    reader = Reader()
    news = News(asyncio.get_running_loop(), reader, None)
    names = [f"r{number}" for number in range(2500)]
    for name in names:
        news.add(name, p.Started(0))
    await until_async(lambda: reader.told)
    assert [len(told) for told in reader.told] == [1024, 1024, 452]
    assert [name for told in reader.told for name, _ in told] == names


async def test_the_tokens_of_a_step_cross_over_together(monkeypatch):
    loop, told, calls = asyncio.get_running_loop(), [], []
    telling = Telling(loop)
    original = loop.call_soon_threadsafe

    def counted(*given):
        calls.append(given)
        return original(*given)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted, raising=False)
    for number in range(8):
        telling.gather(told.append, number)
    await asyncio.sleep(0)
    assert told == []
    telling.flush()
    await until_async(lambda: len(told) == 8)
    telling.flush()
    assert len(calls) == 1
    # What is told at once brings along what was gathered before it.
    telling.gather(told.append, 8)
    telling.tell(told.append, 9)
    await until_async(lambda: len(told) == 10)
    assert told == list(range(10))


async def test_eight_answers_cost_a_fifth_of_a_message_a_token(monkeypatch):
    """Frames there and back, those that begin and end requests included."""
    frames = []
    deliver, encode = aio.AsyncConnection._deliver, aio.encode_frame

    def delivered(self, frame):
        frames.append("in")
        deliver(self, frame)

    def encoded(*given, **named):
        frames.append("out")
        return encode(*given, **named)

    async with fleet() as running:
        worker = await running.add(running_max=8)
        await worker.hello()
        monkeypatch.setattr(aio.AsyncConnection, "_deliver", delivered)
        monkeypatch.setattr(aio, "encode_frame", encoded)
        answers = await asyncio.gather(*(generate(worker, each, count=96) for each in PROMPTS))
        assert [len(tokens_of(each)) for each in answers] == [96] * 8
        assert all(kinds(each)[-1] == "Finished" for each in answers)
        assert len(frames) <= 0.2 * 8 * 96


async def test_a_worker_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(client_module, "DOUBT_S", 0.4)
    async with fleet() as running:
        worker = await running.add()
        monkeypatch.setattr(News, "_send", lambda self, told: None)
        message = p.Generate(new_id(), p.pack_tokens(PROMPTS[0]), p.Sampling(), 500, 60_000)
        with pytest.raises(TransferTimeoutError, match=r"no reply within 0.4 s"):
            await anext(worker.generate(message))
        monkeypatch.undo()
        # The next request has a connection of its own.
        assert kinds(await generate(worker, PROMPTS[0]))[-1] == "Finished"


async def test_who_takes_nothing_is_ended_with_its_requests(monkeypatch):
    monkeypatch.setattr(p, "ABANDONED_S", 0.1)
    monkeypatch.setattr(p, "BEAT_S", 0.05)
    async with fleet() as running:
        await running.add()
        reader = WorkerClient(running.clients[0].address)
        message = p.Generate(new_id(), p.pack_tokens(PROMPTS[0]), p.Sampling(), 500, 60_000)
        stream = reader.generate(message)
        assert isinstance(await anext(stream), p.Queued)
        (connection,) = running.workers[0]._listeners
        connection.pause_writing()  # as when its socket is full
        await until_async(lambda: not running.workers[0]._active)
        await stream.aclose()
        await reader.close()
