"""Sessions of principals, at servers of requests and of data: what they may, and how they end."""

import numpy as np
import pytest

from tests.waiting import until
from tests.wire.helpers import serving
from transfer_engine.base import REFUSED
from transfer_engine.engine import TransferEngine
from transfer_engine.errors import AuthError, ConfigError, PeerLostError
from transfer_engine.rpc import echo
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.server import Server, run
from transfer_engine.segments.memory import Segment
from transfer_engine.transports.server import TransferServer
from transfer_engine.wire.keyring import Alone, Credential, Key, Keyring
from transfer_engine.wire.rights import Rights, Role

PATIENCE_S = 60
PAYLOAD = echo.ECHO.request.pack(payload=b"x" * 100)


class Few(Keyring):
    """The secrets of some principals, who can be forgotten."""

    lasting = False

    def __init__(self, **roles):
        self.own = Credential("", b"nobody has this")
        self.roles = roles

    def accepted(self, principal):
        if principal not in self.roles:
            return ()
        rights = Rights(principal, self.roles[principal])
        return (Key(principal.encode() * 8, rights),)

    def holds(self, rights):
        return rights.role == self.roles.get(rights.principal)


def credential(name):
    return Alone(Credential(name, name.encode() * 8))


def again_and_again(call, *arguments, **options):
    until(lambda: call(*arguments, **options) is call, what="it is refused")


@pytest.fixture
def keyring():
    return Few(alice=Role.ADMIN, bob=Role.ADMIN, reader=Role.READER, writer=Role.WRITER)


def test_a_session_says_whose_it_is(keyring):
    seen = []

    def handle(connection, frame):
        seen.append(connection.session.rights)
        return echo.handle(connection, frame)

    with (
        serving(handle, secret=keyring) as server,
        BlockingConnection.connect(
            server.address, echo.REGISTRY, secret=credential("alice")
        ) as connection,
    ):
        connection.call(echo.ECHO, PAYLOAD, timeout_s=PATIENCE_S)
    assert seen == [Rights("alice", Role.ADMIN)]


def test_what_is_for_others_never_reaches_the_service(keyring):
    asked = []
    with (
        serving(lambda *given: asked.append(given), secret=keyring) as server,
        BlockingConnection.connect(
            server.address, echo.REGISTRY, secret=credential("writer")
        ) as connection,
        pytest.raises(AuthError, match="one of a writer, of writer") as refused,
    ):
        connection.call(echo.ECHO, PAYLOAD, timeout_s=PATIENCE_S)
    assert asked == []
    assert refused.value.operation == "echo"


def test_a_proof_is_worth_nothing_under_another_name(keyring):
    with serving(secret=keyring) as server:
        for name, proved in (("alice", "bob"), ("", "alice"), ("nobody", "nobody")):
            forged = Alone(Credential(name, proved.encode() * 8))
            with pytest.raises(AuthError, match="did not prove"):
                BlockingConnection.connect(server.address, echo.REGISTRY, secret=forged)


@pytest.mark.parametrize("change", ["taken back", "another role"])
def test_a_session_ends_with_its_rights_and_others_go_on(keyring, change):
    with (
        serving(secret=keyring) as server,
        BlockingConnection.connect(
            server.address, echo.REGISTRY, secret=credential("alice")
        ) as alice,
        BlockingConnection.connect(server.address, echo.REGISTRY, secret=credential("bob")) as bob,
    ):
        alice.call(echo.ECHO, PAYLOAD, timeout_s=PATIENCE_S)
        if change == "taken back":
            del keyring.roles["alice"]
        else:
            keyring.roles["alice"] = Role.READER
        with pytest.raises((AuthError, PeerLostError)) as ended:
            again_and_again(alice.call, echo.ECHO, PAYLOAD, timeout_s=PATIENCE_S)
        assert "alice was taken back" in str(ended.value)
        bob.call(echo.ECHO, PAYLOAD, timeout_s=PATIENCE_S)
        if change == "taken back":
            with pytest.raises(AuthError, match="did not prove that it is alice"):
                BlockingConnection.connect(
                    server.address, echo.REGISTRY, secret=credential("alice")
                )


def test_a_server_that_would_refuse_everybody_does_not_start():
    async def start():
        Server(echo.REGISTRY, echo.handle, secret=credential("alice"))

    with pytest.raises(ConfigError, match="guard no port"):
        run(start())
    with pytest.raises(ConfigError, match="guard no port"):
        TransferServer(unix=None, secret=credential("alice"))


# Data.


@pytest.fixture
def served(keyring):
    with (
        TransferServer(unix=None, secret=keyring) as server,
        Segment.create(4096) as segment,
    ):
        yield server, server.publish(segment)


def opened(descriptor, name):
    engine = TransferEngine(secret=credential(name), transports=["tcp"])
    return engine, engine.open(descriptor)


def moved(engine, target, operation):
    place = np.full(100, 7, np.uint8)
    columns = [0], [100], [place.ctypes.data]
    return getattr(engine, operation)(target, *columns, trusted=True, timeout_s=PATIENCE_S)


def test_readers_read_and_leave_no_notes(served):
    server, descriptor = served
    engine, target = opened(descriptor, "reader")
    with engine:
        assert not moved(engine, target, "read_batch").statuses.any()
        assert moved(engine, target, "write_batch").statuses.tolist() == [REFUSED]
        with pytest.raises(AuthError, match="read-only") as refused:
            engine.notify(target, "note")
        assert refused.value.operation == "notify"
    assert server.take_notifications() == []


def test_writers_write_and_leave_notes(served):
    server, descriptor = served
    engine, target = opened(descriptor, "writer")
    with engine:
        assert not moved(engine, target, "write_batch").statuses.any()
        assert engine.notify(target, "note") == 1
    assert [each.name for each in server.take_notifications()] == ["note"]


def test_a_session_of_data_ends_with_its_rights(served, keyring):
    _, descriptor = served
    engine, target = opened(descriptor, "writer")
    with engine:
        moved(engine, target, "read_batch")
        del keyring.roles["writer"]
        with pytest.raises((AuthError, PeerLostError)):
            again_and_again(moved, engine, target, "read_batch")
        with pytest.raises(AuthError, match="did not prove that it is writer"):
            again_and_again(moved, engine, target, "read_batch")
