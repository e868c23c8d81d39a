"""Strangers at a service's port: what is gone before it is met leaves nothing behind."""

import socket
import threading

import pytest

from tests.strangers import descriptors, reset
from tests.waiting import PATIENCE_S
from tests.waiting import until as until_here
from tests.wire.helpers import TIMEOUT_S, serving, until
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.echo import ECHO, REGISTRY

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
