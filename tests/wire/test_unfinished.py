"""Frames that begin and do not end: how many bytes of them a server holds, and for how long."""

import contextlib

import pytest

from tests.waiting import PATIENCE_S, until
from tests.wire.helpers import TIMEOUT_S, connect_raw, serving
from transfer_engine.rpc import server as server_module
from transfer_engine.rpc import unfinished
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.echo import ECHO, REGISTRY
from transfer_engine.rpc.entrance import GROWTH_BYTES, STALL_S
from transfer_engine.rpc.limits import ServerLimits
from transfer_engine.rpc.unfinished import Unfinished
from transfer_engine.wire.frame import encode_frame

LARGE = encode_frame(ECHO.opcode, ECHO.request.pack(payload=bytes(1 << 20)), request_id=1)


class Peer:
    """A connection: what it has of a frame."""

    def __init__(self, count=0):
        self.beginning = bytearray(count)

    def grow(self, count):
        self.beginning += bytes(count)
        return self


def test_the_largest_go_first_when_all_together_are_too_many():
    held = Unfinished(1000)
    small, middle, large = Peer(), Peer(), Peer()
    assert held.grew(small.grow(100)) == []
    assert held.grew(large.grow(600)) == []
    assert held.grew(middle.grow(290)) == []
    assert held.grew(small.grow(100)) == [large]
    assert held.grew(middle.grow(350)) == []


def test_frames_that_ended_count_no_more():
    held = Unfinished(1000)
    for _ in range(20):
        peer = Peer()
        assert held.grew(peer.grow(900)) == []
        peer.beginning = bytearray()


def test_a_frame_has_to_go_on_and_by_enough():
    now = [0.0]
    held = Unfinished(1 << 30, lambda: now[0])
    quick, slow, still = Peer(10), Peer(10), Peer(10)
    peers = [quick, slow, still, Peer()]
    assert held.stalled(peers) == []
    for _ in range(3):
        now[0] += 0.4 * STALL_S
        quick.grow(GROWTH_BYTES)
        slow.grow(1)
        found = held.stalled(peers)
    assert found == [slow, still]
    still.beginning = bytearray(5)  # that frame ended, and another one began
    assert held.stalled(peers) == [slow]


@pytest.mark.parametrize("ahead", [b"", encode_frame(ECHO.opcode, b"x" * 8, request_id=9)])
def test_who_begins_a_request_and_leaves_it_at_that_is_dropped(monkeypatch, ahead):
    """Also where the beginning came with a request before it."""
    monkeypatch.setattr(unfinished, "STALL_S", 0.05)
    monkeypatch.setattr(server_module, "SWEEP_S", 0.02)
    with serving() as server, connect_raw(server.address) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(ahead + LARGE[:5000])
        while sock.recv(1 << 16):
            pass


def test_unfinished_requests_of_all_peers_hold_bounded_memory_and_others_are_served():
    eighth = 1 << 17
    with (
        serving(limits=ServerLimits(unfinished_bytes_max=12 * eighth)) as server,
        connect_raw(server.address) as small,
        connect_raw(server.address) as large,
        connect_raw(server.address) as later,
        BlockingConnection.connect(server.address, REGISTRY) as friend,
    ):
        small.sendall(LARGE[: 2 * eighth])
        large.sendall(LARGE[: 6 * eighth])
        until(lambda: sum(len(each.beginning) for each in server._connections) == 8 * eighth)
        later.sendall(LARGE[: 7 * eighth])
        large.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            assert large.recv(1) == b""
        small.sendall(LARGE[2 * eighth :])
        assert small.recv(1)
        body = ECHO.request.pack(payload=b"x")
        assert friend.call(ECHO, body, timeout_s=TIMEOUT_S) == body
