"""What peers ask of each other: names, notes, probes; over real connections, hostile ones too."""

import asyncio
import os
import socket
import threading

import msgspec
import numpy as np
import pytest

from transfer_engine import Operation, Segment, TransferEngine, TransferServer
from transfer_engine.errors import (
    AuthError,
    BusyError,
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    RemoteProtocolError,
    UnavailableError,
)
from transfer_engine.notify import (
    ANSWER_BYTES_MAX,
    Inbox,
    Notification,
    PeerService,
    Probe,
    Survey,
    decode_answer,
    encode,
)
from transfer_engine.testing import OwnerProcess
from transfer_engine.transports.calling import ask, survey
from transfer_engine.transports.stream import READ, REQUEST
from transfer_engine.wire.frame import MAGIC, VERSION

SIZE = 1 << 20
SECRET = b"a secret of enough bytes"


@pytest.fixture
def server():
    with TransferServer() as server:
        yield server


@pytest.fixture
def segment():
    with Segment.create(SIZE, name="pool") as segment:
        yield segment


def test_a_segment_is_opened_by_its_name_at_its_owner():
    owner = OwnerProcess(secret=SECRET)
    try:
        descriptor = owner.publish(SIZE, 1)
        address = f"{descriptor.tcp_host}:{descriptor.tcp_port}/{descriptor.name}"
        with TransferEngine(secret=SECRET) as engine:
            assert engine.find(address) == descriptor
            assert [path.transport for path in engine.explain(address) if path.chosen] == ["shm"]
            memory = bytearray(16)
            engine.read_into(engine.open(address), 0, memory)
            assert any(memory)
            with pytest.raises(NotFoundError, match="other"):
                engine.open(f"{descriptor.tcp_host}:{descriptor.tcp_port}/other")
        with (
            TransferEngine(secret=b"another one of enough bytes") as stranger,
            pytest.raises(AuthError),
        ):
            stranger.open(address)
    finally:
        owner.close()


def test_two_segments_of_one_name_are_told_apart_by_an_error(server, segment):
    address = "{}:{}/pool".format(*server.tcp_address)
    published = server.publish(segment)
    with Segment.create(SIZE, name="pool") as twin, TransferEngine() as engine:
        assert engine.find(address) == published
        server.publish(twin)
        with pytest.raises(NotFoundError, match="2 segments are published"):
            engine.find(address)
        server.withdraw(twin)
        assert engine.find(address) == published
        server.withdraw(segment)
        with pytest.raises(NotFoundError):
            engine.find(address)


@pytest.mark.parametrize("address", ["pool", "host/pool", "127.0.0.1:1/", "127.0.0.1:1/../x y"])
def test_an_address_that_names_no_process_is_refused(address):
    with TransferEngine() as engine, pytest.raises(InvalidArgumentError):
        engine.open(address)


def test_a_process_that_is_not_there_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with TransferEngine() as engine, pytest.raises(UnavailableError, match=str(port)):
        engine.open(f"127.0.0.1:{port}/pool")


def test_a_note_is_seen_after_the_bytes(server, segment):
    seen = []

    def application():
        (note,) = server.take_notifications(20)
        seen.append((note.name, note.data, bytes(segment.buffer[:5])))

    descriptor = server.publish(segment)
    thread = threading.Thread(target=application)
    thread.start()
    with TransferEngine(transports=["tcp"]) as engine:
        target = engine.open(descriptor)
        region = engine.register(bytearray(b"bytes"))
        submission = engine.submit(
            Operation.WRITE, target, [0], [5], [region.address], notify=("request 7", b"\0done")
        )
        assert submission.result(60).tolist() == [0]
        thread.join(60)
    assert seen == [("request 7", b"\0done", b"bytes")]
    assert server.take_notifications() == []


def test_a_batch_that_failed_leaves_no_note(server, segment):
    with TransferEngine(transports=["tcp"]) as engine:
        target = engine.open(server.publish(segment))
        region = engine.register(bytearray(5))
        submission = engine.submit(
            Operation.WRITE, target, [0, SIZE], [5, 5], [region.address] * 2, notify=("x", b"")
        )
        assert submission.wait(60).tolist()[0] == 0
        assert submission.wait(60).tolist()[1] != 0
    assert server.take_notifications() == []


def test_notes_that_nobody_takes_are_refused(server, segment):
    server.peer_service.inbox = Inbox(waiting_max=2)
    with TransferEngine() as engine:
        target = engine.open(server.publish(segment))
        assert engine.notify(target, "a") == 1
        assert engine.notify(target, "b", b"data") == 2
        for _ in range(3):
            with pytest.raises(BusyError, match="take_notifications"):
                engine.notify(target, "c")
        assert [note.name for note in server.take_notifications()] == ["a", "b"]
        assert engine.notify(target, "d") == 1
        # Refusals leave the connection in step, and batches on it work.
        engine.read_into(target, 0, bytearray(100))
        region = engine.register(bytearray(1))
        submission = engine.submit(
            Operation.READ, target, [0], [1], [region.address], notify=("e", b"")
        )
        submission.result(60)
        late = engine.submit(Operation.READ, target, [0], [1], [region.address], notify=("f", b""))
        with pytest.raises(BusyError):
            asyncio.run(awaited(late))


async def awaited(submission):
    return await submission


def test_a_probe_answers_or_says_who_is_gone():
    owner = OwnerProcess()
    try:
        with TransferEngine() as engine:
            target = engine.open(owner.publish(SIZE, 1))
            assert target.transport == "shm"
            assert 0 < engine.probe(target) < 5
            owner.process.kill()
            owner.process.wait(60)
            with pytest.raises(PeerLostError) as caught:
                engine.probe(target)
            assert str(target.descriptor.tcp_port) in str(caught.value)
    finally:
        owner.close()


def test_without_tcp_nobody_can_be_asked(segment):
    with TransferServer(tcp=None) as server, TransferEngine() as engine:
        target = engine.open(server.publish(segment))
        with pytest.raises(UnavailableError, match="tcp"):
            engine.notify(target, "a")


def test_a_probe_tells_who_answers(server, segment):
    server.publish(segment)
    told = decode_answer(ask(*server.tcp_address, encode(Probe()), None, 5.0), "peer")
    assert (told.pid, told.segments) == (os.getpid(), 1)
    assert server.tcp_address is not None


@pytest.mark.parametrize(
    "question",
    [
        b"",
        b"\xc1",
        b"\x92\xa4find",
        msgspec.msgpack.encode(["find", 7]),
        msgspec.msgpack.encode(["find", "x" * 300]),
        msgspec.msgpack.encode(["post", "x", b"y" * 70_000]),
        msgspec.msgpack.encode(["exec", "x"]),
        b"\x91" * 30_000,
        np.random.default_rng(1).bytes(5000),
    ],
)
def test_nonsense_ends_its_connection_and_no_other(server, segment, question):
    server.publish(segment)
    with pytest.raises((RemoteProtocolError, PeerLostError)):
        ask(*server.tcp_address, question, None, 5.0)
    assert decode_answer(ask(*server.tcp_address, encode(Probe()), None, 5.0), "").segments == 1


def test_lengths_that_do_not_match_are_refused(server):
    """A length beyond what was sent must not read what lies behind it."""
    from transfer_engine.transports import calling
    from transfer_engine.transports.stream import CALL, REQUEST_BODY_BYTES

    def lie(fence, count):
        return REQUEST.pack(
            MAGIC, VERSION, 0, CALL, REQUEST_BODY_BYTES + 16 * count, 0, 0, bytes(16), fence, count
        )

    plain = calling.REQUEST
    for fence, count in ((1000, 1), (0, 1), (1 << 63, 1), (17, 1)):

        class Lying:
            @staticmethod
            def pack(*_, fence=fence, count=count):
                return lie(fence, count) + bytes(16 * count)

        calling.REQUEST = Lying
        try:
            with pytest.raises((RemoteProtocolError, PeerLostError)):
                ask(*server.tcp_address, b"", None, 5.0)
        finally:
            calling.REQUEST = plain
    assert READ != CALL


def test_an_inbox_gives_what_waits_in_order_and_no_more_than_once():
    inbox = Inbox()
    assert inbox.take() == []
    assert inbox.take(0.01) == []
    notes = [Notification("p", str(n), b"") for n in range(5)]
    for note in notes:
        inbox.put(note)
    assert inbox.take() == notes
    assert inbox.take() == []


def test_a_server_tells_what_it_publishes_by_prefix_oldest_first(server, segment):
    address = "{}:{}".format(*server.tcp_address)
    with Segment.create(SIZE, name="other") as other:
        pool, first = server.publish(segment), server.publish(other, name="first")
        assert survey(address, "", None, 5.0) == [pool, first]
        assert [pool.name, first.name] == ["pool", "first"]
        assert survey(address, "fi", None, 5.0) == [first]
        assert survey(address, "other", None, 5.0) == []
        server.withdraw(segment)
        pool = server.publish(segment)
        assert survey(address, "", None, 5.0) == [first, pool]
        server.withdraw(other)


def test_a_name_that_nobody_could_read_is_refused(server, segment):
    with pytest.raises(InvalidArgumentError, match="printable"):
        server.publish(segment, name="two\nlines")
    assert survey("{}:{}".format(*server.tcp_address), "", None, 5.0) == []


def test_an_answer_holds_no_more_segments_than_a_peer_takes(server, segment):
    descriptor = server.publish(segment)

    class Crowded:
        def described(self):
            return [descriptor] * (ANSWER_BYTES_MAX // len(descriptor.encode()))

    service = PeerService(Crowded(), os.getpid(), "host")
    answer = service.answer(encode(Survey("")), "peer")
    assert 0.8 * ANSWER_BYTES_MAX < len(answer) <= ANSWER_BYTES_MAX
    assert set(decode_answer(answer, "peer").descriptors) == {descriptor.encode()}
    assert decode_answer(service.answer(encode(Survey("q")), "peer"), "peer").descriptors == []
