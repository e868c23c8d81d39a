"""What goes wrong is said by type, and names both ends: who asked, and whom."""

import os
import socket
import subprocess
import threading
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from transfer_engine import (
    FileSegment,
    Segment,
    SegmentDescriptor,
    TransferEngine,
    TransferServer,
)
from transfer_engine.errors import (
    AlreadyExistsError,
    AuthError,
    InvalidArgumentError,
    NoSpaceError,
    PeerLostError,
    RemoteProtocolError,
    StoreError,
    TruncatedError,
    UnavailableError,
)
from transfer_engine.segments.blockfile import BlockFile
from transfer_engine.segments.geometry import Geometry
from transfer_engine.testing import OwnerProcess
from transfer_engine.wire.frame import HEADER, MAGIC

SIZE = 1 << 20
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def owner():
    with OwnerProcess() as owner:
        yield owner


@pytest.fixture
def published(owner):
    descriptor = owner.publish(SIZE, 4)
    yield descriptor
    owner.withdraw(descriptor)


def as_another_user(action):
    """Run `action` in a child process of user 65534; return its process id and what it raised."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        told = "nothing was raised"
        try:
            os.setresuid(65534, 65534, 65534)
            action()
        except StoreError as error:
            told = f"{type(error).__name__}: {error}"
        except BaseException as error:
            told = f"no error of this project: {error!r}"
        finally:
            os.write(write_end, told.encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        told = answer.read().decode()
    os.waitpid(child, 0)
    return child, told


@contextmanager
def answering(data):
    """A server that answers whatever comes with these bytes, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            peer, _ = listener.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(data)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(60)


@pytest.mark.parametrize(
    "change",
    [
        {"tcp_host": "a" * 64},
        {"tcp_host": "a..b"},
        {"tcp_host": "\0"},
        {"tcp_host": "h" * 10_000},
        {"tcp_host": ""},
        {"tcp_host": "a b"},
        {"tcp_port": 65_536},
        {"tcp_port": -1},
        {"rails": ("nowhere",)},
        {"rails": ("a" * 64 + ":1",)},
        {"rails": ("unix:/tmp/x",)},
        {"rails": ("127.0.0.1:1",) * 65},
        {"unix_address": "@" + "a" * 108},
        {"unix_address": "/a\0b"},
        {"transports": ("tcp",) * 65},
        {"name": ""},
        {"name": "\x1b[2J"},
        {"name": "n" * 129},
        {"name": "\x9b31m"},
        {"name": "\u202e"},
        {"name": "\u2028"},
        {"host": "h" * 65},
        {"host": "\x1b"},
        {"uid": -1},
        {"uid": 1 << 40},
        {"pid": -1},
        {"pid": 1 << 63},
        {"transports": ("\x1b[2J",)},
        {"transports": ("t" * 17,)},
        {"unix_address": "@\x9b"},
        {"tcp_port": 0},
        {"rails": ("127.0.0.1:0",)},
        {"size": 0},
        {"size": 1 << 63},
        {"uuid": b"short"},
        {"instance": b"short"},
    ],
    ids=lambda change: f"{next(iter(change))}={next(iter(change.values()))!r:.12}",
)
def test_a_descriptor_that_cannot_be_meant_is_refused_when_it_is_read(published, change):
    assert SegmentDescriptor.decode(published.encode()) == published
    said = rf"not a segment descriptor: its .*{next(iter(change))}.* is wrong"
    with pytest.raises(InvalidArgumentError, match=said):
        SegmentDescriptor.decode(msgspec.structs.replace(published, **change).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x91" * 100_000, b"\x90", b"\x9b" + b"\xc0" * 11,
        b"\x9b\xc4\x10" + bytes(16) + b"\x01\xa2\xff\xff", b"\x9b" + b"\x81" * 100_000,
    ],
)  # fmt: skip
def test_bytes_that_are_no_descriptor_are_refused(data):
    with pytest.raises(InvalidArgumentError, match="not a segment descriptor"):
        SegmentDescriptor.decode(data)


@root_only
def test_shared_memory_without_the_right_to_it(published, engine):
    engine.open(published, require="shm")  # imports what another user may not read

    def attempt():
        with TransferEngine() as engine:
            engine.open(published, require="shm")

    child, told = as_another_user(attempt)
    assert told.startswith("AuthError: the owner refused access")
    assert f"process {published.pid}" in told
    assert f"from process {child} of user 65534" in told
    assert "secret" not in told


@root_only
def test_memory_that_is_lent_for_reading_is_not_opened_anew_for_writing():
    """By another user who was handed the descriptor; one's own user and root may do anything."""
    with Segment.create(SIZE) as segment:
        fd = segment.share(writable=False)
        try:
            for fd_mode, code in (("<", 0), ("<>", 2)):
                words = ["sh", "-c", f"exec 2>/dev/null; : {fd_mode}/proc/self/fd/{fd}"]
                given = {"user": 0 if code == 0 else 65534, "pass_fds": [fd], "cwd": "/"}
                assert subprocess.run(words, **given).returncode == code
            assert os.fstat(fd).st_mode & 0o777 == 0o600
        finally:
            os.close(fd)


@root_only
def test_named_segments_without_the_right_to_them(tmp_path):
    path = tmp_path / "private"
    with Segment.create(SIZE, path=path):
        tmp_path.chmod(0o755)
        for action in (
            lambda: Segment.attach(path, uuid=bytes(16)),
            lambda: Segment.create(SIZE, path=tmp_path / "other"),
            lambda: Segment.map(path),
            lambda: FileSegment.open(path),
        ):
            child, told = as_another_user(action)
            assert told.startswith(f"AuthError: process {child} cannot open {tmp_path}"), told
            assert "Permission denied" in told


def test_a_named_segment_that_is_there_or_finds_no_room(tmp_path):
    """A page without room would kill whoever touches it, so the room is asked for first."""
    path = tmp_path / "s"
    room = os.statvfs(tmp_path)
    with pytest.raises(NoSpaceError, match=rf"process {os.getpid()} cannot create .*/s: \d+ bytes"):
        Segment.create(room.f_blocks * room.f_frsize + 1, path=path)
    assert not path.exists()
    with (
        Segment.create(SIZE, path=path),
        pytest.raises(AlreadyExistsError, match=f"process {os.getpid()} cannot open {path}"),
    ):
        Segment.create(SIZE, path=path)


@pytest.mark.parametrize("transport", ["file", "tcp"])
def test_a_full_disk(engine, transport):
    fd = os.open("/dev/full", os.O_RDWR)
    file = BlockFile(fd, "/dev/full", Geometry("file", SIZE, 1, 1))
    data = np.ones(SIZE, np.uint8)
    region = engine.register(data)
    with TransferServer() as server, FileSegment(file, name="full", uuid=None) as segment:
        target = engine.open(server.publish(segment), require=transport)
        for size in (8, SIZE):
            done = engine.write_batch(target, [0], [size], [region.address])
            with pytest.raises(NoSpaceError) as caught:
                done.check()
    told = str(caught.value)
    assert "'full' of process" in told
    assert f"from process {os.getpid()} over {transport}" in told
    assert "leases" not in told


@pytest.mark.parametrize("transport", ["file", "tcp"])
def test_a_short_read(owner, engine, tmp_path, transport):
    descriptor = owner.publish_file(str(tmp_path / "s"), SIZE, 3)
    target = engine.open(descriptor, require=transport)
    os.truncate(tmp_path / "s", SIZE // 2)
    data = np.zeros(100, np.uint8)
    done = engine.read_batch(target, [SIZE // 2 - 50], [100], [engine.register(data).address])
    with pytest.raises(TruncatedError) as caught:
        done.check()
    assert f"process {descriptor.pid}" in str(caught.value)
    assert f"from process {os.getpid()} over {transport}" in str(caught.value)
    owner.withdraw(descriptor)


def test_an_owner_of_another_version(published, engine):
    newer = HEADER.pack(MAGIC, 99, 0, 1, 0, 0, 0)
    with answering(newer) as port:
        there = msgspec.structs.replace(published, tcp_port=port)
        with pytest.raises(RemoteProtocolError, match="version") as caught:
            engine.open(there, require="tcp")
    assert f"127.0.0.1:{port} (from 127.0.0.1:" in str(caught.value)


def test_an_address_where_something_else_answers(published, engine):
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        there = msgspec.structs.replace(published, tcp_port=port)
        with pytest.raises(RemoteProtocolError, match="speaks HTTP") as caught:
            engine.open(there, require="tcp")
    assert f"127.0.0.1:{port} (from 127.0.0.1:" in str(caught.value)


def test_an_address_where_nobody_answers(published, engine, free_port):
    there = msgspec.structs.replace(published, tcp_port=free_port)
    here = f"process {os.getpid()} cannot connect to 127.0.0.1:{free_port}"
    with pytest.raises(PeerLostError, match=here):
        engine.open(there, require="tcp")
    with pytest.raises(UnavailableError, match=f"cannot connect to 127.0.0.1:{free_port}"):
        engine.open(f"127.0.0.1:{free_port}/segment")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_write_that_the_owner_does_not_allow(engine, transport):
    with OwnerProcess(policy="read-only") as owner:
        descriptor = owner.publish(SIZE, 4)
        target = engine.open(descriptor, require=transport)
        with pytest.raises(AuthError, match="access hook") as caught:
            engine.write_from(target, 0, bytes(8))
    assert f"process {descriptor.pid}" in str(caught.value)
    assert f"from process {os.getpid()} over {transport}" in str(caught.value)
