"""The handshake: versions, services, secrets; refusals that say what is wrong."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_engine.errors import AuthError, RemoteProtocolError, StoreError
from transfer_engine.wire.frame import Frame, FrameDecoder, VersionRange, encode_frame
from transfer_engine.wire.handshake import (
    HANDSHAKE_LIMITS,
    ClientHandshake,
    Identity,
    ServerHandshake,
)
from transfer_engine.wire.keyring import read_only_secret

N = 3
CURRENT = VersionRange.ending_at(N)
CLIENT = Identity("store", role="worker", instance="w-1", cluster="blue", features=("a", "b"))
SERVER = Identity("store", role="master", instance="m-1", cluster="blue", features=("b", "c"))


def frames(stream):
    decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False, versions=CURRENT)
    found = decoder.feed(stream)
    assert decoder.error is None
    return found


def converse(client, server):
    """Carry frames between both machines until neither has anything to say."""
    to_server = client.start()
    while to_server:
        to_client = b"".join(server.receive(frame) for frame in frames(to_server))
        to_server = b"".join(client.receive(frame) for frame in frames(to_client))


def pair(*, client_secret=None, server_secret=None, client=CLIENT, versions=CURRENT):
    return (
        ClientHandshake(client, secret=client_secret, versions=versions),
        ServerHandshake(SERVER, secret=server_secret, versions=CURRENT),
    )


@pytest.mark.parametrize("secret", [None, b"hunter2"])
def test_both_sides_learn_who_the_other_is(secret):
    client, server = pair(client_secret=secret, server_secret=secret)
    converse(client, server)
    assert client.session.peer == SERVER
    assert server.session.peer == CLIENT
    assert client.session.version == server.session.version == N
    assert client.session.features == server.session.features == {"b"}
    assert client.session.proven == server.session.proven == (secret is not None)


def test_who_may_only_read_shares_no_features():
    """A feature may be all that a way to write asks for: remote memory access starts with one."""
    client, server = pair(client_secret=read_only_secret(b"hunter2"), server_secret=b"hunter2")
    converse(client, server)
    assert client.session.proven
    assert server.session.read_only
    assert client.session.features == server.session.features == set()
    assert client.session.peer.features == ()


def test_a_server_does_not_change_the_version_once_it_has_asked_for_the_secret():
    client, server = pair(client_secret=b"hunter2", server_secret=b"hunter2")
    (hello,) = frames(client.start())
    (challenge,) = frames(server.receive(hello))
    (proof,) = frames(client.receive(challenge))
    server._agreed = replace(server._agreed, version=N - 1)  # and signs that
    (welcome,) = frames(server.receive(proof))
    with pytest.raises(AuthError):
        client.receive(welcome)
    assert client.session is None


def test_the_previous_version_is_spoken_with_a_peer_that_knows_no_newer():
    client, server = pair(versions=VersionRange.ending_at(N - 1))
    converse(client, server)
    assert client.session.version == server.session.version == N - 1


@pytest.mark.parametrize("theirs", [VersionRange(1, N - 2), VersionRange(N + 1, N + 1)])
def test_versions_too_far_apart_are_refused_and_both_are_named(theirs):
    client, server = pair(versions=theirs)
    with pytest.raises(RemoteProtocolError) as caught:
        converse(client, server)
    assert str(theirs) in str(caught.value)
    assert str(CURRENT) in str(caught.value)
    assert server.session is None
    assert isinstance(server.failure, RemoteProtocolError)


def test_a_newer_peer_that_still_speaks_ours_is_welcome():
    client, server = pair(versions=VersionRange.ending_at(N + 1))
    converse(client, server)
    assert server.session.version == N


@pytest.mark.parametrize(
    ("client_secret", "server_secret", "message"),
    [
        (b"wrong", b"right", "client did not prove"),
        (None, b"right", "asks for a shared secret"),
        (b"right", None, "did not ask for the shared secret"),
    ],
)
def test_no_session_without_the_same_secret(client_secret, server_secret, message):
    client, server = pair(client_secret=client_secret, server_secret=server_secret)
    with pytest.raises(AuthError, match=message):
        converse(client, server)
    assert client.session is None
    if server_secret is not None:
        assert server.session is None


@pytest.mark.parametrize(
    ("me", "message"),
    [
        (Identity("metrics"), "speaks metrics"),
        (Identity("store", cluster="green"), "belongs to green"),
    ],
)
def test_the_wrong_service_and_the_wrong_cluster_are_refused(me, message):
    client, server = pair(client=me)
    with pytest.raises(RemoteProtocolError, match=message):
        converse(client, server)
    assert server.session is None


def test_a_replayed_proof_opens_nothing():
    client, server = pair(client_secret=b"s", server_secret=b"s")
    hello = client.start()
    [challenge] = frames(server.receive(frames(hello)[0]))
    proof = client.receive(challenge)
    server.receive(frames(proof)[0])
    assert server.session is not None
    # The very same bytes, sent to the same service by somebody who listened.
    again = ServerHandshake(SERVER, secret=b"s", versions=CURRENT)
    again.receive(frames(hello)[0])
    again.receive(frames(proof)[0])
    assert again.session is None
    assert isinstance(again.failure, AuthError)


def test_a_proof_sent_back_to_its_author_proves_nothing():
    """A server without the secret cannot answer with what the client just proved."""
    client, server = pair(client_secret=b"s", server_secret=b"s")
    [challenge] = frames(server.receive(frames(client.start())[0]))
    [proof] = frames(client.receive(challenge))
    stolen = msgspec.msgpack.decode(proof.body)[1]
    forged = msgspec.msgpack.encode(["welcome", N, "store", "master", "m", "", [], stolen])
    with pytest.raises(AuthError, match="did not prove"):
        client.receive(frames(encode_frame(4, forged, version=N))[0])


def test_a_changed_hello_breaks_the_proof():
    """Nobody between the two can take a feature or a version away unnoticed."""
    client, server = pair(client_secret=b"s", server_secret=b"s")
    [hello] = frames(client.start())
    fields = msgspec.msgpack.decode(hello.body)
    fields[7] = []
    changed = Frame(hello.opcode, 0, 0, 0, msgspec.msgpack.encode(fields))
    [challenge] = frames(server.receive(changed))
    [proof] = frames(client.receive(challenge))
    server.receive(proof)
    assert isinstance(server.failure, AuthError)


def test_nothing_but_the_proof_is_taken_once_a_secret_is_asked_for():
    client, server = pair(client_secret=b"s", server_secret=b"s")
    [hello] = frames(client.start())
    server.receive(hello)
    server.receive(hello)
    assert server.session is None
    assert isinstance(server.failure, AuthError)
    with pytest.raises(RemoteProtocolError, match="after the end"):
        server.receive(hello)


def test_the_first_frame_must_be_hello():
    _, server = pair()
    server.receive(Frame(3, 0, 0, 0, b""))
    assert "not hello" in str(server.failure)


def test_a_server_that_picks_a_version_nobody_offered_is_refused():
    client, _ = pair()
    client.start()
    welcome = msgspec.msgpack.encode(["welcome", 9, "store", "", "", "", [], b""])
    with pytest.raises(RemoteProtocolError, match="chose version 9"):
        client.receive(Frame(4, 0, 0, 0, welcome))


def test_an_empty_secret_is_a_mistake_not_a_secret():
    with pytest.raises(AuthError, match="empty"):
        ServerHandshake(SERVER, secret=b"")


@given(st.lists(st.tuples(st.integers(0, 6), st.binary(max_size=120)), max_size=3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_stranger_never_gets_past_the_secret(noise, greet):
    client, server = pair(client_secret=b"other", server_secret=b"s")
    script = [frames(client.start())[0]] if greet else []
    script += [Frame(opcode, 0, 0, 0, body) for opcode, body in noise]
    for frame in script:
        if server.failure is None:
            server.receive(frame)
        assert server.session is None
    if not greet and noise:
        assert isinstance(server.failure, StoreError)
