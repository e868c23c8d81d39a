import ctypes
import time

import numpy as np
import pytest
import xxhash

from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.kernels import moving
from transfer_engine.kernels import serving as serving_kernels
from transfer_engine.testing import OwnerProcess, TransportCase, content

SEGMENT_BYTES = 20 << 20
MEMORY_BYTES = 18 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="session")
def _owners():
    owners = []
    yield owners
    for owner in owners:
        owner.close()


@pytest.fixture
def owner(_owners):
    """An owner process: that of the test before, or a new one if the test before ended it."""
    if not _owners or _owners[-1].process.poll() is not None:
        _owners.append(OwnerProcess())
    return _owners[-1]


@pytest.fixture
def engine():
    with TransferEngine() as engine:
        yield engine


@pytest.fixture
def memory():
    return np.zeros(MEMORY_BYTES, np.uint8)


def remote_case(owner, engine, memory, transport):
    descriptor = owner.publish(SEGMENT_BYTES, 5)
    target = engine.open(descriptor, require=transport)
    assert target.transport == transport
    yield TransportCase(
        engine,
        target,
        engine.register(memory),
        memory,
        content(5, SEGMENT_BYTES),
        lambda: owner.digest(descriptor),
    )
    owner.withdraw(descriptor)


@pytest.fixture
def shm_case(owner, engine, memory):
    yield from remote_case(owner, engine, memory, "shm")


@pytest.fixture
def tcp_case(owner, engine, memory):
    yield from remote_case(owner, engine, memory, "tcp")


@pytest.fixture
def local_case(engine, memory):
    with Segment.create(SEGMENT_BYTES) as segment, TransferServer(tcp=None, unix=None) as server:
        np.frombuffer(segment.buffer, np.uint8)[:] = content(5, SEGMENT_BYTES)
        target = engine.open(server.publish(segment))
        assert target.transport == "local"
        yield TransportCase(
            engine,
            target,
            engine.register(memory),
            memory,
            content(5, SEGMENT_BYTES),
            lambda: xxhash.xxh3_128_hexdigest(segment.buffer),
        )


def _bare(name, result, *arguments):
    function = getattr(_LIBC, name)
    function.restype, function.argtypes = result, arguments
    return function


@pytest.fixture(params=["compiled", "python"])
def kernels(request, monkeypatch):
    """The kernels; as plain Python they reach libc, and each other, without numba."""
    if request.param == "compiled":
        return moving
    long, size, number = ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
    memmove = _bare("memmove", long, long, long, size)
    monkeypatch.setattr(moving, "_memmove", lambda *values: memmove(*map(int, values)))
    for name in ("sendmsg", "recvmsg"):
        call = _bare(name, ctypes.c_ssize_t, number, long, number)
        monkeypatch.setattr(moving, f"_{name}", lambda *values, call=call: call(*map(int, values)))
    monkeypatch.setattr(moving, "_sched_yield", _bare("sched_yield", number))
    recv = _bare("recv", ctypes.c_ssize_t, number, long, size, number)
    monkeypatch.setattr(moving, "_recv", lambda *values: recv(*map(int, values)))
    monkeypatch.setattr(moving, "last_errno", ctypes.get_errno)
    monkeypatch.setattr(moving, "now_ns", lambda clock: time.monotonic_ns())
    for name in ("check_batch", "check_ranges", "_copy", "copy_batch", "build_iov", "move_iov",
                 "move_some", "_fill", "_hear", "exchange", "exchange_one", "columns_bytes",
                 "take_request"):  # fmt: skip
        monkeypatch.setattr(moving, name, getattr(moving, name).py_func)
    return moving


@pytest.fixture
def serving(kernels, monkeypatch):
    """The kernels of the owner's loop, compiled or as plain Python like those they call."""
    if not hasattr(kernels.move_iov, "py_func"):
        for name in ("last_errno", "now_ns", "_fill", "build_iov", "check_ranges", "columns_bytes",
                     "move_iov", "move_some"):  # fmt: skip
            monkeypatch.setattr(serving_kernels, name, getattr(kernels, name))
        monkeypatch.setattr(serving_kernels, "_recv", kernels._recv)
        monkeypatch.setattr(serving_kernels, "_sched_yield", kernels._sched_yield)
        for name in ("_poll", "_find", "_belongs", "_look_at_clock", "_shown_columns", "_permitted",
                     "_judge", "_move", "_answer_write", "serve", "change"):  # fmt: skip
            monkeypatch.setattr(serving_kernels, name, getattr(serving_kernels, name).py_func)
    return serving_kernels
