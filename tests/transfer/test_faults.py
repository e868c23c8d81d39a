"""Peers that die, stall, restart, withdraw or lie: typed errors in time, and nobody else hurt."""

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from tests.waiting import long_before, until
from transfer_engine import (
    Operation,
    Segment,
    SegmentDescriptor,
    TransferEngine,
    TransferServer,
    transports,
)
from transfer_engine.base import REFUSED, TIMED_OUT, UNKNOWN_SEGMENT
from transfer_engine.errors import (
    AuthError,
    NotFoundError,
    PeerLostError,
    RemoteProtocolError,
    StoreError,
    TransferError,
    TransferTimeoutError,
)
from transfer_engine.testing import OwnerProcess, content
from transfer_engine.transports import dialing, shm
from transfer_engine.transports.stream import REPLY, REQUEST
from transfer_engine.wire.frame import MAGIC
from transfer_engine.wire.handshake import read_only_secret

SIZE = 8 << 20
BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def setting(owner, engine):
    descriptor = owner.publish(SIZE, 3)
    memory = np.zeros(SIZE, np.uint8)
    return descriptor, memory, engine.register(memory)


@BOTH
def test_a_killed_owner_is_lost(owner, engine, setting, transport):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require=transport)
    owner.process.kill()
    owner.process.wait()
    for move in (engine.read_batch, engine.write_batch):
        # Who waited for the deadline instead of noticing would raise another error.
        with pytest.raises(PeerLostError) as caught:
            move(target, [0], [4096], [region.address], timeout_s=60)
        assert str(descriptor.pid) in str(caught.value) or str(descriptor.tcp_port) in str(
            caught.value
        )
    assert not memory.any()


@BOTH
def test_an_owner_killed_under_way_is_lost(owner, engine, setting, transport):
    descriptor, _, region = setting
    target = engine.open(descriptor, require=transport)
    failures, moved = [], []
    started = threading.Barrier(4)

    def read():
        started.wait()
        try:
            for _ in range(100_000):
                engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=10).check()
                moved.append(SIZE)
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    until(lambda: len(moved) > 5)  # any moment will do: none of them may hang
    owner.process.kill()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert [type(error) for error in failures] == [PeerLostError] * 3
    owner.process.wait(30)  # the next test must not take it for alive


def test_threads_notice_a_lost_owner_together(engine):
    """Many small batches of many threads: each ends with the one error, whoever notices first."""
    region = engine.register(bytearray(8))

    def read(target, moved, failures):
        try:
            while True:
                engine.read_batch(target, [0], [8], [region.address]).check()
                moved.append(8)
        except Exception as error:  # whatever it is: below stands what it must be
            failures.append(error)

    for _ in range(2):
        owner = OwnerProcess()
        try:
            target = engine.open(owner.publish(4096, 1), require="shm")
            moved, failures = [], []
            shared = (target, moved, failures)
            threads = [threading.Thread(target=read, args=shared) for _ in range(4)]
            for thread in threads:
                thread.start()
            until(lambda moved=moved: len(moved) > 100)
            owner.process.kill()
            for thread in threads:
                thread.join(60)
            assert [type(error) for error in failures] == [PeerLostError] * 4
        finally:
            owner.close()


def test_a_stopped_owner_runs_into_the_deadline(owner, engine, setting, monkeypatch):
    monkeypatch.setattr(dialing, "_CONNECT_S", 60.0)
    monkeypatch.setattr(shm, "_MAP_S", 60.0)
    descriptor, _, region = setting
    target = engine.open(descriptor, require="tcp")
    os.kill(owner.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED)  # all its threads
    place = (target, [0], [SIZE], [region.address])
    try:
        with long_before(60):
            with pytest.raises(TransferTimeoutError):
                engine.read_batch(*place, timeout_s=0.3)
            with pytest.raises(TransferTimeoutError):
                engine.write_batch(*place, timeout_s=0.3)
            submission = engine.submit(Operation.READ, *place, timeout_s=0.3)
            assert submission.wait(60).tolist() == [TIMED_OUT]
            assert submission.states() == ["timeout"]
            with TransferEngine() as other, pytest.raises(TransferTimeoutError):
                other.open(descriptor, require="shm", timeout_s=0.3)
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)
    # What the stopped owner still sends belongs to connections that were given up.
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok


def test_a_stopped_owner_does_not_stop_shared_memory(owner, engine, setting):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="shm")
    os.kill(owner.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED)  # all its threads
    try:
        assert engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=20).ok
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)
    assert np.array_equal(memory, content(3, SIZE))


def test_cancelling_wakes_a_blocked_transfer(owner, engine, setting):
    descriptor, _, region = setting
    target = engine.open(descriptor, require="tcp")
    os.kill(owner.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED)  # all its threads
    try:
        submission = engine.submit(
            Operation.READ, target, [0], [SIZE], [region.address], timeout_s=100
        )
        until(lambda: submission.states() == ["pending"])
        until(lambda: submission._batch.interrupt is not None)
        assert submission.cancel()
        submission.wait(30)  # long before its deadline
        assert submission.states() == ["cancelled"]
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)


@BOTH
def test_a_restarted_owner_is_another_one(engine, transport):
    uuid = os.urandom(16)
    memory = np.zeros(SIZE, np.uint8)
    region = engine.register(memory)
    first = OwnerProcess(unix="@mooncake-test-" + uuid.hex())
    try:
        old = first.publish(SIZE, 3, uuid=uuid)
        target = engine.open(old, require=transport)
    finally:
        first.close()
    second = OwnerProcess(tcp=f"127.0.0.1:{old.tcp_port}", unix=old.unix_address)
    try:
        new = second.publish(SIZE, 4, uuid=uuid)
        with pytest.raises(PeerLostError):
            engine.read_batch(target, [0], [1], [region.address])
        with pytest.raises(PeerLostError, match=r"restarted.*new descriptor"):
            engine.open(old, require=transport)
        assert not memory.any()
        target = engine.open(new, require=transport)
        assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
        assert np.array_equal(memory, content(4, SIZE))
    finally:
        second.close()


@BOTH
def test_a_transport_that_was_closed_opens_nothing(owner, setting, transport):
    """A probe may come just after its engine was closed: it must not leave a connection behind."""
    descriptor, _, _ = setting
    closed = transports.create(transport)
    closed.close()
    with pytest.raises(PeerLostError, match="was closed"):
        closed.open(descriptor, time.monotonic() + 5)


def test_pools_of_owners_that_ended_are_dropped(engine):
    """A restarted owner is another one: what was pooled for the former must not stay for ever."""
    region = engine.register(bytearray(8))
    tcp = next(transport for transport in engine._transports if transport.name == "tcp")

    def meet(server):
        target = engine.open(server.publish(segment), require="tcp")
        assert engine.read_batch(target, [0], [8], [region.address]).ok
        return target

    with Segment.create(4096) as segment, TransferServer(unix=None) as living:
        first = meet(living)
        former = []
        for _ in range(5):
            with TransferServer(unix=None) as server:
                meet(server)
                (pool,) = [known for key, known in tcp._pools.items() if key[2] == server.instance]
                former.append(pool)
            (link,) = pool._idle
            until(lambda link=link: not link.idle)
        with TransferServer(unix=None) as server:
            meet(server)
            assert {key[2] for key in tcp._pools} == {living.instance, server.instance}
        assert all(link.sock.fileno() == -1 for pool in former for link in pool._open)
        assert not any(pool._open for pool in former)
        # Who still had the dropped pool in hand is told to take another one.
        assert former[0].acquire(time.monotonic() + 5) is None
        assert engine.read_batch(first, [0], [8], [region.address]).ok


def test_owners_that_ended_are_forgotten_by_who_borrowed_from_them(engine):
    shm = next(transport for transport in engine._transports if transport.name == "shm")
    with Segment.create(4096) as segment:
        for _ in range(5):
            with TransferServer(tcp=None) as server:
                target = engine.open(server.publish(segment), require="shm")
                assert {key[1] for key in shm._peers} == {server.instance}
                target.close()


def test_nobody_waits_past_his_deadline_for_another_who_asks(owner, engine, setting):
    """The owner is stopped: the first to borrow waits long, the second as long as it said."""
    descriptor, _, _ = setting
    engine.open(descriptor, require="shm")
    other = owner.publish(4096, 9)
    (peer,) = next(t for t in engine._transports if t.name == "shm")._peers.values()
    opened = []

    def wait():
        opened.append(engine.open(other, require="shm", timeout_s=60))

    os.kill(owner.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED)  # all its threads
    thread = threading.Thread(target=wait)
    try:
        thread.start()
        until(peer.lock.locked)
        with pytest.raises(TransferTimeoutError, match="another thread"):
            engine.open(other, require="shm", timeout_s=0.2)
        assert not opened
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)
        thread.join(60)
    assert len(opened) == 1


@BOTH
def test_a_withdrawn_segment_is_unknown(owner, engine, setting, transport):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require=transport)
    other = owner.publish(4096, 9)
    owner.withdraw(descriptor)
    until(
        lambda: (
            engine.read_batch(target, [0, 9], [8, 0], [region.address] * 2).statuses.tolist()
            == [UNKNOWN_SEGMENT] * 2
        )
    )
    memory[:] = 0
    done = engine.write_batch(target, [0], [SIZE], [region.address])
    assert done.statuses.tolist() == [UNKNOWN_SEGMENT]
    with pytest.raises(NotFoundError):
        done.check()
    with pytest.raises(NotFoundError):
        engine.open(descriptor, require=transport)
    # The connection is in step: other segments of the owner are still there.
    assert engine.read_batch(
        engine.open(other, require=transport), [0], [4096], [region.address]
    ).ok
    assert np.array_equal(memory[:4096], content(9, 4096))


@BOTH
def test_withdrawing_under_load_ends_every_transfer(owner, engine, setting, transport):
    descriptor, _, region = setting
    target = engine.open(descriptor, require=transport)
    outcomes = []

    def read():
        while True:
            try:
                status = int(
                    engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=10).statuses[
                        0
                    ]
                )
            except TransferError as error:
                status = error.code
            if status:
                outcomes.append(status)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    owner.withdraw(descriptor)
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 3
    assert set(outcomes) <= {UNKNOWN_SEGMENT, PeerLostError.code}


def test_views_outlive_handle_and_owner(owner, engine, setting):
    descriptor, _, _ = setting
    target = engine.open(descriptor, require="shm")
    view = target.view(100, 5000)
    assert view.readonly
    target.close()
    engine.close()
    owner.close()
    assert bytes(view) == content(3, SIZE)[100:5100].tobytes()


def test_the_access_hook_decides(engine):
    owner = OwnerProcess(policy="fence=7")
    try:
        descriptor = owner.publish(SIZE, 3)
        before = owner.digest(descriptor)
        memory = np.full(SIZE, 77, np.uint8)
        region = engine.register(memory)
        for transport in ("tcp", "shm"):
            target = engine.open(descriptor, require=transport)
            done = engine.write_batch(target, [0, 5], [4, SIZE - 5], [region.address] * 2, fence=6)
            assert done.statuses.tolist() == [REFUSED] * 2
            assert owner.digest(descriptor) == before
            assert engine.read_batch(target, [0], [1], [region.address]).ok
        target = engine.open(descriptor, require="tcp")
        memory[:] = 77
        assert engine.write_batch(target, [0], [SIZE], [region.address], fence=7).ok
        assert owner.digest(descriptor) != before
    finally:
        owner.close()


def test_nobody_may_map_what_the_hook_denies(engine):
    owner = OwnerProcess(policy="nobody")
    try:
        descriptor = owner.publish(SIZE, 3)
        with pytest.raises(AuthError):
            engine.open(descriptor, require="shm")
    finally:
        owner.close()


@pytest.mark.parametrize("secret", [None, b"guess"])
def test_the_secret_is_needed(secret):
    owner = OwnerProcess(secret=b"the secret")
    try:
        descriptor = owner.publish(4096, 3)
        with TransferEngine(secret=secret) as engine, pytest.raises(AuthError):
            engine.open(descriptor, require="tcp")
        with TransferEngine(secret=b"the secret") as engine:
            assert engine.open(descriptor, require="tcp").transport == "tcp"
    finally:
        owner.close()


def test_the_read_only_secret_reads_and_is_refused_writes():
    owner = OwnerProcess(secret=b"the secret")
    try:
        descriptor = owner.publish(4096, 3)
        with TransferEngine(secret=read_only_secret(b"the secret")) as engine:
            target = engine.open(descriptor, require="tcp")
            place = np.zeros(100, np.uint8)
            columns = [50], [100], [place.ctypes.data]
            assert not engine.read_batch(target, *columns, trusted=True).statuses.any()
            assert place.tobytes() == bytes(content(3, 4096)[50:150])
            before = owner.digest(descriptor)
            place[:] = 7
            refused = engine.write_batch(target, *columns, trusted=True)
            assert refused.statuses.tolist() == [REFUSED]
            assert owner.digest(descriptor) == before
    finally:
        owner.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_shared_memory(owner, setting):
    descriptor, _, _ = setting
    pid = os.fork()
    if pid == 0:
        verdict = 1
        try:
            os.setuid(65534)
            with TransferEngine() as engine:
                try:
                    engine.open(descriptor, require="shm")
                except AuthError:
                    verdict = 0
                target = engine.open(descriptor)  # falls back to tcp, visibly
                if target.transport != "tcp" or "failed" not in target.report[1].reason:
                    verdict = 2
        finally:
            os._exit(verdict)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@BOTH
def test_a_forked_child_goes_on_by_itself(owner, engine, setting, transport):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require=transport)
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    expected = content(3, SIZE)
    pid = os.fork()
    if pid == 0:
        verdict = 1
        try:
            memory[:] = 0
            if engine.read_batch(target, [0], [SIZE], [region.address]).ok:
                verdict = 0 if np.array_equal(memory, expected) else 2
            engine.submit(Operation.READ, target, [0], [4], [region.address]).result()
        finally:
            os._exit(verdict)
    for _ in range(20):
        memory[:] = 0
        assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
        assert np.array_equal(memory, expected)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok


def greeted(descriptor):
    """Return a connection that has passed the handshake, for saying anything on it."""
    from transfer_engine.transports.tcp import _Pool

    link, _ = _Pool(descriptor, None, 1).acquire(time.monotonic() + 5) or ()
    link.deadline = time.monotonic() + 5
    return link


def request(descriptor, *, opcode=0x20, flags=0, count=1, body=None, magic=MAGIC, version=1):
    return REQUEST.pack(
        magic, version, flags, opcode, 32 + 16 * count if body is None else body, 0, 1,
        descriptor.uuid, 0, count,
    )  # fmt: skip


def columns(*values):
    return np.array(values, np.int64).tobytes()


HOSTILE = {
    "magic": lambda d: request(d, magic=7) + columns(0, 1),
    "version": lambda d: request(d, version=99) + columns(0, 1),
    "opcode": lambda d: request(d, opcode=0x99) + columns(0, 1),
    "flags": lambda d: request(d, flags=3) + columns(0, 1),
    "count": lambda d: request(d, count=1 << 40, body=32) + bytes(64),
    "count past the limit": lambda d: request(d, count=70_000) + bytes(64),
    "negative count": lambda d: request(d, count=(1 << 64) - 1, body=16) + bytes(64),
    "body": lambda d: request(d, body=40) + columns(0, 1),
    "negative length": lambda d: request(d) + columns(0, -1),
    "sum overflows": lambda d: request(d, count=2) + columns(0, 0, 1 << 62, 1 << 62),
    "absurd write": lambda d: request(d, opcode=0x21) + columns(0, 1 << 40),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_messages_end_their_own_connection(owner, engine, setting, name):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="tcp")
    before = owner.digest(descriptor)
    link = greeted(descriptor)
    link.send(HOSTILE[name](descriptor))
    link.receive(link.view[: REPLY.size])
    flags = REPLY.unpack_from(link.view)[2]
    assert flags == 3  # a reply that is an error; then the connection ends
    with pytest.raises(PeerLostError):
        link.receive(memoryview(bytearray(1 << 20)))
    link.close()
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    assert np.array_equal(memory, content(3, SIZE))
    assert owner.digest(descriptor) == before


@pytest.mark.parametrize("opcode", [0x20, 0x21])
def test_ranges_out_of_bounds_are_refused_by_the_owner(owner, setting, opcode):
    descriptor, _, _ = setting
    before = owner.digest(descriptor)
    link = greeted(descriptor)
    offsets = (SIZE, -1, (1 << 63) - 1, -(1 << 63), SIZE - 1, 0)
    lengths = (1, 8, 8, 8, 2, SIZE + 1)
    link.send(request(descriptor, opcode=opcode, count=6) + columns(*offsets, *lengths))
    if opcode == 0x21:
        link.send(b"\xee" * sum(lengths))
    link.receive(link.view[: REPLY.size])
    *_, body, _, _, data, refused = REPLY.unpack_from(link.view)
    assert (data, refused) == (0, 6)
    statuses = bytearray(body - 16)
    link.receive(memoryview(statuses))
    assert set(np.frombuffer(statuses, np.int32)[:6].tolist()) == {-600}
    link.close()
    assert owner.digest(descriptor) == before


def test_garbage_and_silence_on_the_port_harm_nobody(owner, engine, setting):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="tcp")
    threads = owner.ask("threads")
    address = (descriptor.tcp_host, descriptor.tcp_port)
    rng = np.random.default_rng(6)
    for size in (0, 1, 23, 24, 25, 1000, 100_000):
        with socket.create_connection(address) as sock:
            sock.sendall(rng.integers(0, 256, size, np.uint8).tobytes())
    for part in (0, 10, 56, 60):
        link = greeted(descriptor)
        link.send((request(descriptor, opcode=0x21) + columns(0, 1 << 20))[:part])
        link.close()
    with socket.create_connection(address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: mooncake\r\n\r\n")
        assert b"speaks HTTP" in sock.recv(4096)
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    assert np.array_equal(memory, content(3, SIZE))
    until(lambda: owner.ask("threads") <= threads)


def test_a_write_cut_short_leaves_the_rest(owner, setting):
    descriptor, _, _ = setting
    link = greeted(descriptor)
    link.send(request(descriptor, opcode=0x21) + columns(0, SIZE))
    link.send(b"\x11" * 1000)
    link.close()
    expected = content(3, SIZE)
    expected[:1000] = 0x11
    import xxhash

    until(lambda: owner.digest(descriptor) == xxhash.xxh3_128_hexdigest(expected))


def test_a_full_owner_says_so():
    owner = OwnerProcess(connections_max=2)
    try:
        descriptor = owner.publish(4096, 3)
        links = [greeted(descriptor) for _ in range(2)]
        with TransferEngine() as engine, pytest.raises(StoreError, match="2 data connections"):
            engine.open(descriptor, require="tcp")
        for link in links:
            link.close()
    finally:
        owner.close()


def test_a_server_that_lies_is_refused(engine):
    listener = socket.create_server(("127.0.0.1", 0))
    descriptor = SegmentDescriptor(
        uuid=bytes(16), size=64, name="x", writable=True, host="elsewhere", instance=bytes(16),
        uid=0, pid=1, transports=("shm", "tcp"), unix_address="@nobody",
        tcp_host="127.0.0.1", tcp_port=listener.getsockname()[1],
    )  # fmt: skip

    def lie():
        sock, _ = listener.accept()
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
        sock.recv(100)
        sock.close()

    thread = threading.Thread(target=lie)
    thread.start()
    with pytest.raises(RemoteProtocolError, match="HTTP"):
        engine.open(descriptor)
    thread.join(60)
    listener.close()
