"""Strangers at a service's port, and more sessions than it has: who means it is served."""

import asyncio
import socket
import threading

import pytest

from tests.strangers import Crowd, descriptors, reset
from tests.waiting import PATIENCE_S
from tests.waiting import until as until_here
from tests.wire.helpers import TIMEOUT_S, connect_raw, lent, on_loop, serving, until
from transfer_engine.errors import UnavailableError
from transfer_engine.rpc import echo, entrance
from transfer_engine.rpc.aio import AsyncClient
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.echo import ECHO, REGISTRY, SLEEP
from transfer_engine.rpc.entrance import PER_ADDRESS_MAX
from transfer_engine.rpc.limits import ServerLimits
from transfer_engine.rpc.pool import BlockingPool
from transfer_engine.wire.handshake import ClientHandshake, Identity

SMALL = ECHO.request.pack(payload=b"x" * 100)


def answers(server):
    with BlockingConnection.connect(server.address, REGISTRY) as client:
        return client.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


@pytest.fixture
def busy():
    """Keep the loop of a server busy, so that it accepts nobody meanwhile; returns its release."""
    going_on = threading.Event()

    def keep(server):
        server.loop.call_soon_threadsafe(going_on.wait, PATIENCE_S)
        return going_on

    yield keep
    going_on.set()


def test_who_connects_and_is_gone_at_once_leaves_nothing(busy, caplog):
    with serving() as server:
        assert answers(server)
        until(server, lambda: server.connections == 0)
        before = descriptors()
        going_on = busy(server)
        for _ in range(100):
            reset(server.address.host, server.address.port)
        going_on.set()
        assert answers(server)
        until(server, lambda: server.connections == 0)
        until_here(lambda: descriptors() == before)
    assert [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")] == []


def test_who_left_before_it_was_met_counts_neither_as_served_nor_as_refused(busy):
    with serving() as server:
        going_on = busy(server)
        for _ in range(10):
            reset(server.address.host, server.address.port)
        silent = socket.create_connection((server.address.host, server.address.port))
        going_on.set()
        until(server, lambda: server.connections == 1)
        silent.close()
        until(server, lambda: server.connections == 0)


def crowd(server):
    return Crowd(lambda: socket.create_connection((server.address.host, server.address.port)))


@pytest.mark.parametrize("sent", [b"", ClientHandshake(Identity("echo")).start()[:30]])
def test_strangers_fill_no_place_that_others_need(sent, caplog):
    """More than there are places for: who comes last gets in, though none has left by itself."""
    with serving(limits=ServerLimits(handshake_s=TIMEOUT_S)) as server, crowd(server) as strangers:
        for _ in range(300):
            strangers.come(sent)
        assert answers(server)
        assert 0 < strangers.left() <= PER_ADDRESS_MAX
        until(server, lambda: 0 < server.connections <= PER_ADDRESS_MAX)
    assert len(caplog.records) == 1


@pytest.fixture
def unrested(monkeypatch):
    """Let sessions make room as soon as nothing is under way."""
    monkeypatch.setattr(entrance, "RESTS_S", 0.0)


def test_an_idle_session_makes_room_and_its_client_connects_anew(unrested):
    with (
        serving(limits=ServerLimits(connections_max=2)) as server,
        BlockingPool(server.address, REGISTRY) as one,
        BlockingPool(server.address, REGISTRY) as two,
        BlockingPool(server.address, REGISTRY) as three,
    ):
        for _ in range(3):
            for pool in (one, two, three):
                assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
                until(server, lambda: server.connections <= 2)


def test_a_session_with_a_request_under_way_makes_no_room(unrested):
    with (
        serving(limits=ServerLimits(connections_max=1)) as server,
        BlockingConnection.connect(server.address, REGISTRY) as client,
    ):
        asked = client.send(SLEEP, SLEEP.request.pack(ms=60_000), timeout_s=TIMEOUT_S)
        [connection] = server._connections
        until(server, lambda: connection._tasks)
        with pytest.raises(UnavailableError, match="all its 1 connections"):
            BlockingConnection.connect(server.address, REGISTRY)
        assert asked in client._waiting


def test_a_session_that_waits_for_news_makes_no_room(unrested):
    def follow(connection, frame):
        connection.on_close(lambda: None)
        return frame.body

    with (
        serving(follow, limits=ServerLimits(connections_max=1)) as server,
        BlockingConnection.connect(server.address, REGISTRY) as client,
    ):
        assert client.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
        with pytest.raises(UnavailableError, match="all its 1 connections"):
            BlockingConnection.connect(server.address, REGISTRY)


class Counted:
    """Echoes, and counts what it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, connection, frame):
        self.asked += 1
        return echo.handle(connection, frame)


def made_room_unseen(server, going_on):
    """Have all sessions make room on a loop that is busy: before it reads what comes meanwhile."""
    for connection in tuple(server._connections):
        server.loop.call_soon_threadsafe(connection.give_way)
    return going_on


def test_a_request_that_crosses_the_end_of_its_idle_session_is_served_once(busy):
    handle = Counted()
    with serving(handle) as server, BlockingPool(server.address, REGISTRY) as pool:
        pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
        going_on = made_room_unseen(server, busy(server))
        threading.Timer(0.05, going_on.set).start()
        assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
        assert handle.asked == 2


def test_a_request_to_a_session_that_has_made_room_is_served(busy):
    """It is found out when the request is sent: what the server said is there, and its end."""
    with serving() as server, BlockingPool(server.address, REGISTRY) as pool:
        with lent(pool) as connection:
            connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
            [there] = server._connections
            on_loop(server, there.give_way)
            until_here(connection.stale)
            until(server, lambda: server.connections == 0)
            connection._socket.send(b"x")  # is answered with a reset
            with pytest.raises(UnavailableError, match="made room"):
                until_here(lambda: connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S) and None)
        assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


def test_an_asyncio_client_does_not_notice_that_its_session_made_room(busy):
    handle = Counted()
    with serving(handle) as server:

        async def main():
            async with AsyncClient(server.address, REGISTRY) as client:
                await client.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
                going_on = made_room_unseen(server, busy(server))
                threading.Timer(0.05, going_on.set).start()
                calls = [client.call(ECHO, SMALL, timeout_s=TIMEOUT_S) for _ in range(3)]
                assert await asyncio.gather(*calls) == [SMALL] * 3

        asyncio.run(main())
    assert handle.asked == 4


def test_a_raw_session_is_told_why_it_ends():
    with serving() as server, connect_raw(server.address) as sock:
        [connection] = server._connections
        on_loop(server, connection.give_way)
        assert b"made room" in sock.recv(1 << 16)
