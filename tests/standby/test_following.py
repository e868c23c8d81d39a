"""Following a leader that falls silent, and being told to stop meanwhile."""

import threading

import pytest

from mooncake_store.standby import following
from mooncake_store.standby.following import Follower
from tests.waiting import PATIENCE_S, long_before, until
from tests.wire.helpers import serving
from transfer_engine.rpc.echo import REGISTRY, SLEEP

LONG_S = 2 * PATIENCE_S


class Asking(Follower):
    """Asks a leader that answers after a minute or two."""

    def __init__(self, address):
        super().__init__("test", REGISTRY, None)
        self._where = address
        self.asked = threading.Event()
        self.taken = False

    def _connect(self):
        return self._connect_to(self._where, "")

    def _ask(self):
        self.asked.set()
        self._connection.call(SLEEP, SLEEP.request.pack(ms=int(1000 * LONG_S)), timeout_s=LONG_S)
        self.taken = True


@pytest.fixture
def asking():
    with serving() as server:
        made = Asking(str(server.address))
        made.start()
        yield made
        made.stop()


def test_a_silent_leader_is_not_waited_for_by_who_stops(asking):
    assert asking.asked.wait(PATIENCE_S)
    with long_before(LONG_S):
        asking.stop()
        until(lambda: not asking._thread.is_alive())
    assert not asking.taken


def test_a_host_that_cannot_be_reached_is_not_waited_for_either(asking, monkeypatch):
    connecting, held = threading.Event(), threading.Event()
    monkeypatch.setattr(following, "RETRY_S", 0.0)

    def connect():
        connecting.set()
        assert held.wait(LONG_S)
        return connection

    assert asking.asked.wait(PATIENCE_S)
    connection = asking._connect()
    monkeypatch.setattr(asking, "_connect", connect)
    asking._connection.interrupt()
    assert connecting.wait(PATIENCE_S)
    asking.asked.clear()
    with long_before(LONG_S):
        asking.stop()
    held.set()
    # What it reached after all is let go, and not asked.
    until(lambda: not asking._thread.is_alive())
    assert connection.closed
    assert not asking.asked.is_set()
