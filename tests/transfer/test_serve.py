"""The owner's compiled loop: what it answers, what it leaves to Python, and when it stops."""

import os
import socket
import threading
import time

import numpy as np
import pytest

from tests.transfer.rights import KEY, granted, receipts
from tests.waiting import until, until_idle
from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.errors import NotFoundError
from transfer_engine.kernels import rights, used_rights
from transfer_engine.kernels.moving import COLUMNS_AT, PEER_CLOSED, REPLY_WORDS, UNEXPECTED
from transfer_engine.transports.guarding import namespace_word
from transfer_engine.transports.stream import (
    DATA_BYTES_MAX,
    FIXED,
    READ,
    READ_SHOWN,
    REPLY,
    REPLY_BODY_BYTES,
    REQUEST,
    REQUEST_BODY_BYTES,
    WRITE,
    WRITE_SHOWN,
)
from transfer_engine.transports.tcp_server import TcpServer
from transfer_engine.wire.frame import MAGIC, VERSION
from transfer_engine.wire.frame import REPLY as REPLY_FLAG

UUID = bytes(range(16))


def request(opcode, ranges, number=7, uuid=UUID, shown=None):
    columns = np.array(ranges, np.int64).reshape(-1, 2).T.tobytes()
    columns += b"" if shown is None else shown.T.tobytes()
    body = REQUEST_BODY_BYTES + len(columns)
    head = REQUEST.pack(MAGIC, VERSION, 0, opcode, body, 0, number, uuid, 0, len(ranges))
    return head + columns


def reply(opcode, number, data, more=0):
    body = REPLY_BODY_BYTES + more
    return REPLY.pack(MAGIC, VERSION, REPLY_FLAG, opcode, body, 0, number, data, 0)


class Loop:
    """One end of a socket pair, served by the kernel; the other is the client's."""

    def __init__(self, kernels, spin_ns=0, watch=1, room=8):
        self.kernels = kernels
        self.client, self.owner = socket.socketpair()
        self.client.settimeout(60)
        self.memory = np.arange(4096, dtype=np.int64).view(np.uint8)
        self.opened = np.ones(1, np.int64)
        low, high = np.frombuffer(UUID, np.int64)
        self.rows = np.array(
            [5, 6, *[0] * 8, low, high, self.memory.ctypes.data, self.memory.size, 1,
             self.opened.ctypes.data, 0, 0, 0, 0]
        )  # fmt: skip
        self.version = np.zeros(2, np.int64)
        self.peer = np.array([0, 1, 1000])
        self.used = used_rights.make(16)
        self.seen = 0
        self.naming = np.zeros(2, np.int64)
        self.watch = np.zeros(watch, np.int64)
        self.spin_ns = spin_ns
        self.message = np.zeros(COLUMNS_AT + room, np.int64)
        self.iov = np.zeros(8 + 2 * room, np.int64)
        self.state = np.zeros(kernels.STATE_WORDS, np.int64)

    def take(self, data):
        """Put a request where `take_request` would have."""
        raw = np.frombuffer(data, np.int64)
        self.message[REPLY_WORDS : REPLY_WORDS + raw.size] = raw
        self.state[:] = 0

    def serve(self):
        return self.kernels.serve(
            self.owner.fileno(), self.message, self.iov, FIXED, self.rows, self.version,
            self.seen, self.naming, self.watch, self.spin_ns, self.peer, self.used, self.state,
        )  # fmt: skip

    def receive(self, count):
        got = b""
        while len(got) < count:
            got += self.client.recv(count - len(got))
        return got

    def close(self):
        self.client.close()
        self.owner.close()


@pytest.fixture
def loop(serving):
    loop = Loop(serving)
    yield loop
    loop.close()


def test_a_read_is_answered_with_its_ranges(loop):
    loop.take(request(READ, [(8, 16), (4000, 8)]))
    assert loop.serve() == loop.kernels.IDLE
    assert loop.receive(REPLY.size) == reply(READ, 7, 24)
    assert loop.receive(24) == loop.memory[8:24].tobytes() + loop.memory[4000:4008].tobytes()
    assert loop.state[5] == 1
    assert not loop.naming.any()


def test_a_write_lands_where_it_was_meant_to(loop):
    loop.take(request(WRITE, [(16, 4), (100, 4)]))
    loop.client.send(b"abcdefgh")
    before = loop.memory.copy()
    assert loop.serve() == loop.kernels.IDLE
    assert loop.receive(REPLY.size) == reply(WRITE, 7, 0)
    before[16:20] = list(b"abcd")
    before[100:104] = list(b"efgh")
    assert np.array_equal(loop.memory, before)


def test_requests_that_follow_are_answered_in_order(serving):
    loop = Loop(serving, spin_ns=50_000_000)
    loop.take(request(READ, [(0, 8)], number=1))
    loop.client.send(request(READ, [(8, 8)], number=2) + request(READ, [], number=3))
    loop.client.send(request(WRITE, [(24, 8)], number=4) + b"12345678")
    assert loop.serve() == loop.kernels.IDLE
    assert loop.state[5] == 4
    whole = loop.receive(4 * REPLY.size + 16)
    assert whole == (
        reply(READ, 1, 8) + loop.memory[:8].tobytes() + reply(READ, 2, 8)
        + loop.memory[8:16].tobytes() + reply(READ, 3, 0) + reply(WRITE, 4, 0)
    )  # fmt: skip
    assert loop.memory[24:32].tobytes() == b"12345678"
    assert not loop.watch.any()
    loop.close()


@pytest.mark.parametrize(
    "asked",
    [
        request(READ, [(4096 * 8 - 7, 8)]),
        request(READ, [(-8, 8)]),
        request(READ, [(0, -1)]),
        request(READ, [(0, 8), (1 << 62, 1 << 62)]),
        request(READ, [(0, 8)], uuid=bytes(16)),
        request(READ, [(0, 8)], uuid=UUID[::-1]),
        request(0x28, [(0, 8)]),
        request(0x7F, [(0, 8)]),
        b"\1" + request(READ, [(0, 8)])[1:],
    ],
)
def test_what_is_not_plain_is_left_to_python(loop, asked):
    loop.take(asked)
    assert loop.serve() == UNEXPECTED
    assert loop.state[3] == loop.kernels.JUDGE
    assert not loop.naming.any()
    loop.client.setblocking(False)
    with pytest.raises(BlockingIOError):
        loop.client.recv(1)


def test_a_segment_that_is_read_only_closed_or_replaced_is_left_to_python(loop):
    loop.rows[14] = 0
    loop.take(request(WRITE, [(0, 8)]))
    assert loop.serve() == UNEXPECTED
    loop.take(request(READ, [(0, 8)]))
    assert loop.serve() == loop.kernels.IDLE
    loop.kernels.change(loop.version)
    loop.take(request(READ, [(0, 8)]))
    assert loop.serve() == UNEXPECTED
    loop.seen = int(loop.version[0])
    assert loop.serve() == loop.kernels.IDLE
    loop.opened[0] = 0
    loop.take(request(READ, [(0, 8)]))
    assert loop.serve() == UNEXPECTED


def test_a_request_that_does_not_fit_is_left_to_python_with_its_header_alone(serving):
    loop = Loop(serving, spin_ns=50_000_000)
    loop.take(request(READ, [(0, 8)]))
    many = request(READ, [(8, 8)] * 5, number=9)
    loop.client.send(many)
    assert loop.serve() == UNEXPECTED
    assert loop.state[3] == loop.kernels.COLUMNS
    head = loop.message[REPLY_WORDS:COLUMNS_AT].tobytes()
    assert head + loop.owner.recv(1000) == many
    loop.close()


def test_more_bytes_than_a_message_may_carry_are_left_to_python(loop):
    loop.rows[13] = DATA_BYTES_MAX + 1
    loop.take(request(READ, [(0, DATA_BYTES_MAX), (0, 1)]))
    loop.client.close()  # who sends it after all fails, and does not wait for a reader
    assert loop.serve() == UNEXPECTED


@pytest.mark.parametrize("more", [-16, 16])
def test_a_body_that_its_ranges_do_not_fill_is_left_to_python(serving, more):
    loop = Loop(serving, spin_ns=50_000_000)
    loop.take(request(READ, [(0, 8)]))
    body = REQUEST_BODY_BYTES + 16 + more
    wrong = REQUEST.pack(MAGIC, VERSION, 0, READ, body, 0, 9, UUID, 0, 1) + bytes(16)
    loop.client.send(wrong)
    assert loop.serve() == UNEXPECTED
    assert loop.state[3] == loop.kernels.COLUMNS
    assert loop.state[5] == 1
    loop.close()


def test_the_end_of_the_stream_ends_the_loop(serving):
    loop = Loop(serving, spin_ns=50_000_000)
    loop.take(request(READ, [(0, 8)]))
    loop.client.shutdown(socket.SHUT_WR)
    assert loop.serve() == PEER_CLOSED
    loop.close()


def test_one_of_those_that_share_a_word_polls(serving):
    loop = Loop(serving, spin_ns=60_000_000_000)
    loop.watch[0] = 12345
    loop.take(request(READ, [(0, 8)]))
    assert loop.serve() == loop.kernels.IDLE
    assert loop.watch[0] == 12345
    loop.close()


def test_with_one_processor_nobody_polls(serving):
    loop = Loop(serving, spin_ns=60_000_000_000, watch=0)
    loop.take(request(READ, [(0, 8)]))
    assert loop.serve() == loop.kernels.IDLE
    loop.close()


# What is guarded.


@pytest.fixture
def guarded(loop):
    """The loop, whose segment is guarded, and a peer who has to show rights."""
    loop.rows[-4:] = 1, *np.frombuffer(KEY, np.int64), namespace_word("tenants")
    loop.peer = np.array([1, 1, 1000, namespace_word("others")])
    return loop


@pytest.mark.parametrize("ranges", [[(8, 16)], [(8, 16), (4000, 8)] * 6])
def test_rights_are_judged_in_the_loop(serving, ranges):
    loop = Loop(serving, room=4 * len(ranges))
    loop.rows[-4:-1] = 1, *np.frombuffer(KEY, np.int64)
    loop.peer = np.array([1, 1, 1000])
    columns = np.array(ranges).T
    loop.take(request(READ_SHOWN, ranges, shown=granted(rights.READ, *columns)))
    assert loop.serve() == loop.kernels.IDLE
    size = int(columns[1].sum())
    assert loop.receive(REPLY.size) == reply(READ_SHOWN, 7, size)
    assert loop.receive(size) == b"".join(
        loop.memory[at : at + length].tobytes() for at, length in ranges
    )
    shown = granted(rights.WRITE, *columns)
    loop.take(request(WRITE_SHOWN, ranges, shown=shown))
    loop.client.send(bytes(size))
    assert loop.serve() == loop.kernels.IDLE
    count = len(ranges)
    assert loop.receive(REPLY.size) == reply(WRITE_SHOWN, 7, 0, more=8 * count)
    assert loop.receive(8 * count) == receipts(*columns, shown).tobytes()
    assert not any(loop.memory[at : at + length].any() for at, length in ranges)
    loop.take(request(WRITE_SHOWN, ranges, shown=shown))
    assert loop.serve() == UNEXPECTED, "the right was used"
    loop.close()


@pytest.mark.parametrize("opcode", [READ, WRITE, READ_SHOWN, WRITE_SHOWN])
def test_who_shows_no_good_rights_is_left_to_python(guarded, opcode):
    shown = np.ones((1, 2), np.int64) if opcode in (READ_SHOWN, WRITE_SHOWN) else None
    guarded.take(request(opcode, [(8, 16)], shown=shown))
    assert guarded.serve() == UNEXPECTED
    assert guarded.state[3] == guarded.kernels.JUDGE
    assert not guarded.naming.any()


def test_who_belongs_to_the_namespace_of_a_segment_is_asked_nothing(guarded):
    guarded.peer[-1] = namespace_word("tenants")
    guarded.take(request(READ, [(8, 16)]))
    assert guarded.serve() == guarded.kernels.IDLE
    guarded.peer[1] = 0
    guarded.take(request(WRITE, [(8, 16)]))
    assert guarded.serve() == UNEXPECTED


@pytest.mark.parametrize(("seconds", "told"), [(0.5, True), (60, False)])
def test_a_right_that_ends_while_the_kernel_waits_is_told(guarded, seconds, told):
    guarded.owner.setblocking(False)
    shown = granted(rights.WRITE, [8], [16], seconds=seconds)
    guarded.take(request(WRITE_SHOWN, [(8, 16)], shown=shown))
    before = time.monotonic() * 1000
    code = guarded.serve()
    assert (code == guarded.kernels.ENDING) == told
    left = guarded.state[guarded.kernels.ENDS] - before
    assert seconds * 1000 - 5000 < left <= seconds * 1000 + 5000


def test_bytes_that_come_after_the_end_of_a_right_are_not_taken(guarded):
    guarded.owner.setblocking(False)
    shown = granted(rights.WRITE, [8], [16], seconds=60)
    guarded.take(request(WRITE_SHOWN, [(8, 16)], shown=shown))
    guarded.serve()  # it waits
    before = guarded.memory.copy()
    guarded.client.send(bytes(16))
    guarded.state[guarded.kernels.ENDS] = int(time.monotonic() * 1000) - 1
    assert guarded.serve() == guarded.kernels.ENDING
    assert guarded.state[3] == guarded.kernels.TAKE
    assert np.array_equal(guarded.memory, before)


# The loop at work in a server.


@pytest.fixture
def served():
    with (
        Segment.create(1 << 20) as segment,
        TransferServer(unix=None) as server,
        TransferEngine(transports=["tcp"]) as engine,
    ):
        memory = np.zeros(1 << 20, np.uint8)
        yield segment, server, engine, engine.register(memory), memory


def test_a_process_bound_to_one_processor_serves():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with (
            Segment.create(4096) as segment,
            TransferServer(unix=None) as server,
            TransferEngine(transports=["tcp"]) as engine,
        ):
            segment.buffer[:3] = b"one"
            memory = np.zeros(4096, np.uint8)
            target, region = engine.open(server.publish(segment)), engine.register(memory)
            for _ in range(20):
                assert engine.read_batch(target, [0], [4096], [region.address]).ok
            assert memory[:3].tobytes() == b"one"
    finally:
        os.sched_setaffinity(0, before)


def test_memory_that_nobody_asks_about_is_served_without_python(served, monkeypatch):
    segment, server, engine, region, memory = served
    asked = []
    plain = TcpServer._batch

    def batch(self, link, whole):
        asked.append(whole)
        plain(self, link, whole)

    monkeypatch.setattr(TcpServer, "_batch", batch)
    segment.buffer[:4] = b"data"
    target = engine.open(server.publish(segment))
    assert engine.read_batch(target, [0], [4096], [region.address]).ok
    assert memory[:4].tobytes() == b"data"
    assert not asked
    segment.close()
    with pytest.raises(NotFoundError):
        engine.read_batch(target, [0], [8], [region.address]).check()
    assert asked  # what the loop leaves alone is seen here


def test_a_segment_published_later_is_served_on_the_same_connection(served):
    segment, server, engine, region, memory = served
    target = engine.open(server.publish(segment))
    for _ in range(50):
        assert engine.read_batch(target, [0], [4096], [region.address]).ok
    with Segment.create(4096) as late:
        late.buffer[:4] = b"late"
        other = engine.open(server.publish(late))
        assert engine.read_batch(other, [0], [4], [region.address]).ok
        assert memory[:4].tobytes() == b"late"
        server.withdraw(late)
        with pytest.raises(NotFoundError):
            engine.read_batch(other, [0], [4], [region.address]).check()
    assert engine.read_batch(target, [0], [4], [region.address]).ok


def test_a_closed_segment_is_refused_though_nobody_withdrew_it(served):
    segment, server, engine, region, _ = served
    target = engine.open(server.publish(segment))
    assert engine.read_batch(target, [0], [8], [region.address]).ok
    segment.close()
    with pytest.raises(NotFoundError):
        engine.read_batch(target, [0], [8], [region.address]).check()


def test_withdrawing_waits_for_nobody_who_is_idle_and_nothing_moves_afterwards(served):
    segment, server, engine, region, memory = served
    target = engine.open(server.publish(segment))
    stop, failures = threading.Event(), []

    def read():
        while not stop.is_set():
            done = engine.read_batch(target, [0], [1 << 18], [region.address])
            if not done.ok:
                failures.append(done.statuses[0])
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        np.frombuffer(segment.buffer, np.uint8)[:] = 1
        until(lambda: memory[: 1 << 18].all())
        started = time.monotonic()
        server.withdraw(segment, timeout_s=100.0)
        assert time.monotonic() - started < 50
        np.frombuffer(segment.buffer, np.uint8)[:] = 0xEE
        reader.join(60)
        assert failures == [NotFoundError.code]
        assert not (memory == 0xEE).any()
    finally:
        stop.set()
        reader.join(60)


def test_an_idle_server_costs_no_processor_time(served):
    segment, server, engine, region, _ = served
    target = engine.open(server.publish(segment))
    for _ in range(300):
        assert engine.read_batch(target, [0], [4096], [region.address]).ok
    until_idle()
