"""Peers that die, stall, restart, withdraw or lie: typed errors in time, and nobody else hurt."""

import contextlib
import math
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import long_before, until
from transfer_engine import (
    Operation,
    Segment,
    TransferEngine,
    TransferServer,
    transports,
)
from transfer_engine.base import REFUSED, TIMED_OUT, UNKNOWN_SEGMENT
from transfer_engine.errors import (
    AuthError,
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.testing import OwnerProcess, content
from transfer_engine.transports import dialing, shm, stream
from transfer_engine.wire.keyring import read_only_secret

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


def bytes_on_their_way_to(port):
    """What sockets of this machine still hold for a port, whoever had them open."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    waiting = [row[4].partition(":")[0] for row in rows if row[2].endswith(f":{port:04X}")]
    return sum(int(count, 16) for count in waiting)


def test_nothing_of_a_write_that_was_given_up_is_sent_later(owner, engine, setting):
    descriptor, _, region = setting
    target = engine.open(descriptor, require="tcp")
    place = (target, [0], [SIZE], [region.address])
    assert engine.read_batch(*place).ok
    os.kill(owner.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED)  # all its threads
    try:
        with pytest.raises(TransferTimeoutError):
            engine.write_batch(*place, timeout_s=0.3)
        assert bytes_on_their_way_to(descriptor.tcp_port) == 0
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)


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
    # An address of its own, whose port nobody takes while it is free.
    alone = f"127.{uuid[0]}.{uuid[1]}.{uuid[2] % 254 + 1}"
    first = OwnerProcess(tcp=f"{alone}:0", unix="@mooncake-test-" + uuid.hex())
    try:
        old = first.publish(SIZE, 3, uuid=uuid)
        target = engine.open(old, require=transport)
    finally:
        first.close()
    second = OwnerProcess(tcp=f"{alone}:{old.tcp_port}", unix=old.unix_address)
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


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_a_connection_that_died_unused_costs_a_second_one_and_no_error(
    engine, setting, monkeypatch, operation
):
    """It may die between the look at it and its use; a second one that dies is a lost peer."""
    descriptor, _, region = setting
    target = engine.open(descriptor, require="tcp")
    move = engine.read_batch if operation is Operation.READ else engine.write_batch
    exchange, cut = stream.Link.exchange, []

    def dying(link, *given):
        if cut and cut.pop():
            link.sock.shutdown(socket.SHUT_RDWR)
        return exchange(link, *given)

    monkeypatch.setattr(stream.Link, "exchange", dying)
    arguments = target, [0, 4096], [4096, 4096], [region.address, region.address + 4096]
    assert move(*arguments).ok
    cut[:] = [1]
    assert move(*arguments).ok
    assert not cut
    cut[:] = [1, 1]
    with pytest.raises(PeerLostError) as caught:
        move(*arguments)
    assert caught.value.operation == operation.verb
    assert not cut  # and a third was not tried
    assert move(*arguments).ok


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_one_request_on_a_connection_that_died_goes_over_another(
    engine, setting, monkeypatch, operation
):
    descriptor, _, region = setting
    target = engine.open(descriptor, require="tcp")
    move = engine.read_batch if operation is Operation.READ else engine.write_batch
    exchange, cut = stream.Link.exchange_one, [1]

    def dying(link, *given, **more):
        if cut and cut.pop():
            link.sock.shutdown(socket.SHUT_RDWR)
        return exchange(link, *given, **more)

    arguments = target, [0], [4096], [region.address]
    assert move(*arguments).ok
    monkeypatch.setattr(stream.Link, "exchange_one", dying)
    assert move(*arguments).ok
    assert not cut


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


def test_an_owner_that_was_full_for_long_is_reached_once_it_has_room(engine, monkeypatch):
    """However often it was tried meanwhile: more often than there are connections to an owner."""
    monkeypatch.setattr("transfer_engine.rpc.entrance.RESTS_S", math.inf)  # none makes room
    with (
        Segment.create(4096) as segment,
        TransferServer(unix=None, connections_max=1) as server,
        TransferEngine(transports=["tcp"]) as other,
    ):
        descriptor = server.publish(segment)
        other.open(descriptor)
        for _ in range(20):
            with pytest.raises(StoreError, match="1 data connections"):
                engine.open(descriptor, require="tcp")
        other.close()

        def reached():
            with contextlib.suppress(UnavailableError):  # the owner has not seen yet that it left
                return engine.open(descriptor, require="tcp")

        region = engine.register(bytearray(8))
        assert engine.read_batch(until(reached), [0], [8], [region.address]).ok


def test_owners_that_ended_are_forgotten_by_who_borrowed_from_them(engine):
    shm = next(transport for transport in engine._transports if transport.name == "shm")
    with Segment.create(4096) as segment:
        for _ in range(5):
            with TransferServer(tcp=None) as server:
                target = engine.open(server.publish(segment), require="shm")
                assert {key[1] for key in shm._peers} == {server.instance}
                target.close()


def test_an_owner_that_sends_nonsense_is_lost_and_no_other(engine):
    with (
        Segment.create(4096) as one,
        Segment.create(4096) as other,
        TransferServer(tcp=None) as lying,
        TransferServer(tcp=None) as honest,
    ):
        from_lying = engine.open(lying.publish(one), require="shm")
        (client,) = lying._shm._clients
        client.sock.send(b"nonsense")
        from_honest = engine.open(honest.publish(other), require="shm")
        region = engine.register(bytearray(8))
        assert engine.read_batch(from_honest, [0], [8], [region.address]).ok
        with pytest.raises(PeerLostError, match="sent 8 bytes, not a message"):
            engine.read_batch(from_lying, [0], [8], [region.address])


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
    owner = OwnerProcess(secret=b"the secret of the owner")
    try:
        descriptor = owner.publish(4096, 3)
        with TransferEngine(secret=secret) as engine, pytest.raises(AuthError):
            engine.open(descriptor, require="tcp")
        with TransferEngine(secret=b"the secret of the owner") as engine:
            assert engine.open(descriptor, require="tcp").transport == "tcp"
    finally:
        owner.close()


def test_the_read_only_secret_reads_and_is_refused_writes():
    owner = OwnerProcess(secret=b"the secret of the owner")
    try:
        descriptor = owner.publish(4096, 3)
        with TransferEngine(secret=read_only_secret(b"the secret of the owner")) as engine:
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
