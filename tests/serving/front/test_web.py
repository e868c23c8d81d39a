"""A port served by aiohttp: slow bodies, more sessions than fit, and what is logged of nonsense."""

import asyncio
import contextlib
import gzip

import pytest
from aiohttp import web as aiohttp_web

from mooncake_store.program import web
from tests.waiting import PATIENCE_S, until_async
from transfer_engine.rpc import entrance
from transfer_engine.rpc.accepting import listen


class Served:
    """An application that echoes, and waits before where it is told so; and its clients."""

    def __init__(self):
        self.entered = 0
        self.go_on = asyncio.Event()
        application = aiohttp_web.Application()
        application.router.add_post("/", self._echo)
        self.server = web.WebServer(application, listen("127.0.0.1", 0), "a port")
        self._writers = []

    async def _echo(self, request):
        body = await request.read()
        self.entered += 1
        if body == b"slow":
            await self.go_on.wait()
        return aiohttp_web.Response(body=body)

    async def connect(self, sent=b""):
        reader, writer = await asyncio.open_connection(*self.server.address)
        self._writers.append(writer)
        writer.write(sent)
        return reader, writer

    async def ask(self, body):
        """Connect and send a request; returns the connection."""
        return await self.connect(request(body))

    async def __aenter__(self):
        await self.server.start()
        return self

    async def __aexit__(self, *_):
        self.go_on.set()
        for writer in self._writers:
            writer.close()
        await self.server.cleanup()


def request(body, length=None):
    length = len(body) if length is None else length
    return f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body


async def told(reader):
    """The status line and body of an answer; nothing where the connection ended."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        fields = dict(line.lower().split(": ") for line in head.decode().split("\r\n")[1:-2])
        body = await reader.readexactly(int(fields["content-length"]))
        return head.split(b"\r\n")[0], body
    return b"", b""


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(web, "SESSIONS_MAX", 2)
    monkeypatch.setattr(entrance, "RESTS_S", 0.0)


def test_who_has_nothing_asked_makes_room_and_who_is_answered_does_not():
    async def main():
        async with Served() as served:
            slow, _ = await served.ask(b"slow")
            await until_async(lambda: served.entered == 1)
            idle, _ = await served.ask(b"fast")
            assert (await told(idle))[1] == b"fast"
            other, _ = await served.ask(b"slow")
            assert await told(idle) == (b"", b"")
            await until_async(lambda: served.entered == 3)
            refused, _ = await served.ask(b"fast")
            assert b" 503 " in (await told(refused))[0]
            served.go_on.set()
            for reader in (slow, other):
                assert (await told(reader))[1] == b"slow"

    asyncio.run(main())


def test_who_is_still_sending_makes_room():
    async def main():
        async with Served() as served:
            for _ in range(5):
                await served.connect(request(b"half", 100))
            reader, _ = await served.ask(b"whole")
            assert (await told(reader))[1] == b"whole"

    asyncio.run(main())


def test_a_body_has_to_go_on(monkeypatch):
    monkeypatch.setattr(web, "STALL_S", 0.06)

    async def main():
        async with Served() as served:
            reader, writer = await served.connect(request(b"half", 1 << 20))

            def dripped():
                writer.write(b"x")
                return reader.at_eof() or reader.exception()

            await until_async(dripped)

    asyncio.run(main())


def test_a_large_body_that_goes_on_is_taken(monkeypatch):
    monkeypatch.setattr(web, "GROWTH_BYTES", 1)

    async def main():
        async with Served() as served:
            body = bytes(1 << 19)
            reader, _ = await served.ask(body)
            assert (await told(reader))[1] == body

    asyncio.run(main())


def test_a_body_stays_as_small_as_it_came():
    async def main():
        async with Served() as served:
            packed = gzip.compress(bytes(1 << 20))
            head, _, body = request(packed).partition(b"\r\n\r\n")
            reader, _ = await served.connect(head + b"\r\nContent-Encoding: gzip\r\n\r\n" + body)
            assert (await told(reader))[1] == packed

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nX: "])
def test_who_does_not_finish_a_first_request_is_dropped(monkeypatch, sent):
    monkeypatch.setattr(web, "HANDSHAKE_S", 0.05)

    async def main():
        async with Served() as served:
            reader, _ = await served.connect(sent)
            assert await told(reader) == (b"", b"")
            await until_async(lambda: served.server.entrance.guests == 0)

    asyncio.run(main())


def test_a_head_without_an_end_is_dropped():
    async def main():
        async with Served() as served:
            reader, _ = await served.connect(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)
            assert await told(reader) == (b"", b"")

    asyncio.run(main())


def test_nonsense_is_answered_each_time_and_logged_once(caplog):
    async def main():
        async with Served() as served:
            for _ in range(20):
                reader, _ = await served.connect(b"\x00 nonsense \x01\r\n\r\n")
                assert b" 400 " in (await told(reader))[0]

    asyncio.run(main())
    assert len(caplog.records) <= 1


def test_it_ends_with_strangers_and_sessions_connected():
    async def main():
        async with Served() as served:
            stranger, _ = await served.connect(b"GET")
            session, _ = await served.ask(b"fast")
            assert (await told(session))[1] == b"fast"
            await until_async(lambda: served.server.entrance.guests == 2)
            await served.server.cleanup()
            assert await told(stranger) == await told(session) == (b"", b"")

    asyncio.run(main())
