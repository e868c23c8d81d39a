"""A relay: it passes everything on unchanged, and is noticed all the same."""

import asyncio
import contextlib
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import pytest

from tests.strangers import relay
from tests.wire.helpers import serving
from transfer_engine.engine import TransferEngine
from transfer_engine.errors import AuthError, ConfigError, PeerLostError, UnavailableError
from transfer_engine.rpc import echo
from transfer_engine.rpc.aio import AsyncConnection
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.reached import Reached, dialled, end_of, reached_as
from transfer_engine.segments.memory import Segment
from transfer_engine.transports.dialing import dial
from transfer_engine.transports.server import TransferServer
from transfer_engine.wire.keyring import read_only_secret

SECRET = b"the secret of the pool"
PAYLOAD = echo.ECHO.request.pack(payload=b"x")
BOTH = pytest.mark.parametrize("client", ["blocking", "asyncio"])


def call(client, address, secret=SECRET):
    if client == "blocking":
        with BlockingConnection.connect(address, echo.REGISTRY, secret=secret) as connection:
            return connection.call(echo.ECHO, PAYLOAD, timeout_s=60)

    async def asked():
        async with await AsyncConnection.connect(address, echo.REGISTRY, secret=secret) as there:
            return await there.call(echo.ECHO, PAYLOAD, timeout_s=60)

    return asyncio.run(asked())


@BOTH
def test_who_is_between_gets_no_session(client):
    with serving(secret=SECRET) as server, relay(server.address) as between:
        assert call(client, server.address) == PAYLOAD
        with pytest.raises(AuthError, match="somebody may stand between") as refused:
            call(client, between)
        assert between in refused.value.what
        assert f"reached_as = {between}" in refused.value.advice


@pytest.mark.parametrize("kind", ["host:port", "host", "any"])
@BOTH
def test_what_is_meant_to_lead_here_may(client, kind):
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    further = {"host:port": f"127.0.0.1:{port}", "host": "127.0.0.1", "any": "any"}[kind]
    with (
        serving(secret=SECRET, reached_as=[further]) as server,
        relay(server.address, port) as there,
    ):
        assert call(client, there) == PAYLOAD


def test_who_reads_only_is_asked_as_well():
    with serving(secret=SECRET) as server, relay(server.address) as between:
        reader = read_only_secret(SECRET)
        with pytest.raises(AuthError, match="stand between"):
            BlockingConnection.connect(between, echo.REGISTRY, secret=reader)


def test_without_a_secret_nobody_could_tell():
    with serving() as server, relay(server.address) as between:
        assert call("blocking", between, None) == PAYLOAD


def test_data_do_not_pass_through_others():
    """What a poisoned descriptor leads to: the victim proves to the owner, and reads by a relay."""
    with (
        TransferServer(unix=None, secret=SECRET) as server,
        Segment.create(4096) as segment,
        TransferEngine(secret=SECRET, transports=["tcp"]) as engine,
    ):
        descriptor = server.publish(segment)
        with relay(f"127.0.0.1:{descriptor.tcp_port}") as between:
            poisoned = msgspec.structs.replace(descriptor, tcp_port=int(between.rpartition(":")[2]))
            place = np.zeros(8, np.uint8)
            columns = [0], [8], [engine.register(place).address]
            with pytest.raises((AuthError, UnavailableError), match="stand between"):
                engine.read_batch(engine.open(poisoned), *columns, timeout_s=60)
            assert not engine.read_batch(engine.open(descriptor), *columns).statuses.any()


@pytest.mark.parametrize(
    ("further", "dialled", "fine"),
    [
        ([], "10.0.0.1:7", True),
        ([], "10.0.0.1:8", False),
        ([], "10.0.0.2:7", False),
        ([], "", True),  # an older client
        (["10.0.0.2:7"], "10.0.0.2:7", True),
        (["10.0.0.2:7"], "10.0.0.2:8", False),
        (["10.0.0.2"], "10.0.0.2:8", True),
        (["10.0.0.2"], "10.0.0.21:8", False),
        (["2001:db8::1"], "2001:db8::1:8", True),
        (["[2001:db8::1]:8"], "2001:db8::1:8", True),
        (["[2001:db8::1]:8"], "2001:db8::1:9", False),
        (["::ffff:10.0.0.2"], "10.0.0.2:8", True),
        (["any"], "203.0.113.1:1", True),
        ([], "nonsense", False),
        ([], "any", False),
    ],
)
def test_addresses_are_compared_by_number(further, dialled, fine):
    assert (Reached(further).objection(dialled, ("10.0.0.1", 7)) is None) == fine


def test_ends_are_written_alike_on_both_sides():
    assert end_of(("::ffff:10.0.0.1", 7)) == end_of(("10.0.0.1", 7)) == "10.0.0.1:7"
    assert end_of(("fe80::1%eth0", 7)) == end_of(("fe80::1", 7))


@pytest.mark.parametrize("text", ["", "name:7", "10.0.0.1:", "10.0.0.1:70000", "10.0.0:7", "a b"])
def test_what_is_no_address_by_number_is_refused(text):
    with pytest.raises(ConfigError, match="no address by number"):
        reached_as(text)


def test_who_is_gone_before_anything_was_said_is_lost():
    """The kernel has no name for the other end any more, which is no error of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        gone = threading.Event()

        def reset_all():
            while not gone.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as each:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))

        thread = threading.Thread(target=reset_all)
        thread.start()
        try:
            for _ in range(100):
                with pytest.raises((PeerLostError, UnavailableError)):
                    dial(address, None, secret=None, deadline=time.monotonic() + 60)
                for client in ("blocking", "asyncio"):
                    with pytest.raises((PeerLostError, UnavailableError)):
                        call(client, f"127.0.0.1:{address[1]}")
        finally:
            gone.set()
            socket.create_connection(address).close()
            thread.join()


def test_without_a_name_nothing_is_claimed():
    assert dialled(None) == ""
    assert dialled(("10.0.0.1", 7)) == "10.0.0.1:7"
