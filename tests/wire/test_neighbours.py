"""Other users of the host: who is at the other end of a loopback, and what he is told."""

import logging
import os
import socket
from contextlib import closing

import pytest

from tests.wire.helpers import serving
from transfer_engine.errors import AuthError, PeerLostError, UnavailableError
from transfer_engine.notify import Alive, Probe
from transfer_engine.rpc import echo, neighbours
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.segments.memory import Segment
from transfer_engine.transports.calling import ask_at
from transfer_engine.transports.server import TransferServer

NOBODY = 65534
SECRET = b"the secret of the pool"
PAYLOAD = echo.ECHO.request.pack(payload=b"x")
FAMILIES = pytest.mark.parametrize(
    ("host", "family"),
    [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("127.0.0.1", socket.AF_INET6)],
    ids=["4", "6", "4 as 6"],
)
root_alone = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def pair(host, family):
    """Both ends of a connection."""
    where = "::" if family == socket.AF_INET6 and host == "127.0.0.1" else host
    with (
        socket.create_server((where, 0), family=family, dualstack_ipv6=where == "::") as listener,
        socket.create_connection((host, listener.getsockname()[1])) as near,
    ):
        far, _ = listener.accept()
        with far:
            yield near, far


def ends(far):
    return neighbours._end(far.getpeername()), neighbours._end(far.getsockname())


@FAMILIES
@pytest.mark.parametrize("way", ["asked", "looked up"])
def test_both_ways_tell_whose_the_other_end_is(pair, way):
    _, far = pair
    if way == "asked":
        assert neighbours._asked(*ends(far)) == os.geteuid()
    else:
        assert neighbours._looked_up(*ends(far)) == os.geteuid()


@FAMILIES
@pytest.mark.parametrize("way", ["asked", "looked up"])
def test_what_its_process_has_closed_is_no_longer_roots(pair, way):
    """The kernel says 0 of a socket without a process, which is root's number."""
    near, far = pair
    near.close()
    if way == "asked":
        user = neighbours._asked(*ends(far))
    else:
        user = neighbours._looked_up(*ends(far))
    assert user == neighbours._NOBODY
    with pytest.raises(ConnectionResetError):
        neighbours.stranger(far)


def test_where_nothing_tells_everybody_comes_in_and_the_log_says_so(monkeypatch, caplog):
    def gone(*_):
        raise OSError("no such thing")

    monkeypatch.setattr(neighbours, "_asked", gone)
    monkeypatch.setattr(neighbours, "_TABLES", ("/proc/none",))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        closing(listener.accept()[0]) as far,
    ):
        assert neighbours.user_of(*ends(far)) is None
        assert neighbours.stranger(far) is None
    assert "cannot be seen" in caplog.text


def as_nobody(call, *arguments):
    """What a function returns to another user, in a child; an error as its text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            told = call(*arguments)
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told


def call(address, secret):
    with BlockingConnection.connect(address, echo.REGISTRY, secret=secret) as connection:
        connection.call(echo.ECHO, PAYLOAD, timeout_s=60)
    return "answered"


def probe(address):
    ask_at(address, Probe(), Alive, None, 60)
    return "answered"


@root_alone
@pytest.mark.parametrize(
    ("options", "secret", "told"),
    [
        ({}, None, f"this is for user 0 of the host, and user {NOBODY} is at the other end"),
        ({"insecure": True}, None, "answered"),
        ({"secret": SECRET}, SECRET, "answered"),
    ],
    ids=["no secret", "insecure", "secret"],
)
def test_another_user_is_served_if_it_knows_a_secret_or_all_are(options, secret, told):
    with serving(**options) as server:
        assert told in as_nobody(call, server.address, secret)
        if not options:
            assert call(server.address, secret) == "answered"


@root_alone
@pytest.mark.parametrize(
    ("options", "told"), [({}, "is at the other end"), ({"insecure": True}, "answered")]
)
def test_another_user_gets_no_data_either(options, told):
    with TransferServer(unix=None, **options) as server, Segment.create(4096) as segment:
        descriptor = server.publish(segment)
        assert told in as_nobody(probe, f"127.0.0.1:{descriptor.tcp_port}")


def test_what_comes_from_elsewhere_is_not_asked_about(monkeypatch):
    asked = []
    monkeypatch.setattr(neighbours, "user_of", lambda *ends: asked.append(ends))

    class Far:
        def getpeername(self):
            return ("203.0.113.7", 9)

        def getsockname(self):
            return ("203.0.113.8", 9)

    assert neighbours.stranger(Far()) is None
    assert asked == []


def test_an_answer_of_another_user_is_an_error_with_a_next_step(monkeypatch):
    monkeypatch.setattr(neighbours, "user_of", lambda *_: 12345)
    with serving() as server, pytest.raises(AuthError) as refused:
        BlockingConnection.connect(server.address, echo.REGISTRY)
    expected = os.geteuid()
    assert f"user {expected}" in refused.value.what
    assert "--insecure" in refused.value.advice


def test_who_has_left_is_served_nothing_and_no_line_of_the_log(monkeypatch, caplog):
    monkeypatch.setattr(neighbours, "user_of", lambda *_: neighbours._NOBODY)
    with serving() as server, TransferServer(unix=None) as data:
        with pytest.raises((PeerLostError, UnavailableError)):
            BlockingConnection.connect(server.address, echo.REGISTRY)
        with pytest.raises((PeerLostError, UnavailableError)):
            ask_at("{}:{}".format(*data.tcp_address), Probe(), Alive, None, 60)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
