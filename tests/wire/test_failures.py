"""What an error says of times: never that one was negative, however late the caller was."""

import asyncio
import re
import time

import pytest

from tests.wire.helpers import serving
from transfer_engine.errors import TransferTimeoutError
from transfer_engine.rpc.aio import AsyncConnection
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.echo import ECHO, REGISTRY
from transfer_engine.rpc.failures import locate, overdue
from transfer_engine.rpc.pool import BlockingPool
from transfer_engine.transports.dialing import dial

LATE = [-0.005, -1e-9, -3600.0, 0.0]
SMALL = ECHO.request.pack(payload=b"x" * 100)
NEGATIVE = re.compile(r"-\d")


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.mark.parametrize("timeout_s", [*LATE, 4e-6, 0.0009])
def test_no_time_to_ask_is_no_time_to_answer(timeout_s):
    error = overdue("127.0.0.1:7", "get", timeout_s, 0.25)
    assert error.what == "the deadline passed before this could be asked"
    assert "operation get, peer 127.0.0.1:7, after 0.250 s" in str(error)
    assert not NEGATIVE.search(str(error))
    assert overdue("127.0.0.1:7", "get", 0.5, 0.5).what == "no reply within 0.5 s"


def by_connection(address, timeout_s):
    with BlockingConnection.connect(address, REGISTRY) as connection:
        connection.call(ECHO, SMALL, timeout_s=timeout_s)


def by_pool(address, timeout_s):
    with BlockingPool(address, REGISTRY) as pool:
        pool.call(ECHO, SMALL, timeout_s=60)  # has a connection from now on
        pool.call(ECHO, SMALL, timeout_s=timeout_s)


def by_full_pool(address, timeout_s):
    with BlockingPool(address, REGISTRY, connections_max=1) as pool:
        lent = pool.acquire(timeout_s=60)
        try:
            pool.call(ECHO, SMALL, timeout_s=timeout_s)
        finally:
            pool.release(lent)


def by_loop(address, timeout_s):
    async def main():
        async with await AsyncConnection.connect(address, REGISTRY) as connection:
            await connection.call(ECHO, SMALL, timeout_s=timeout_s)

    asyncio.run(main())


def by_dialing(address, timeout_s):
    deadline = time.monotonic() + timeout_s
    dial((address.host, address.port), None, secret=None, deadline=deadline)


@pytest.mark.parametrize("timeout_s", LATE)
@pytest.mark.parametrize("call", [by_connection, by_pool, by_full_pool, by_loop, by_dialing])
def test_a_call_that_comes_too_late_speaks_of_no_negative_time(server, call, timeout_s):
    with pytest.raises(TransferTimeoutError) as caught:
        call(server.address, timeout_s)
    assert not NEGATIVE.search(str(caught.value))
    assert caught.value.elapsed_s is None or caught.value.elapsed_s >= 0
    assert str(server.address) in str(caught.value)


def test_an_error_is_completed_and_nothing_it_says_is_changed():
    told = locate(TransferTimeoutError("late"), "a:1", "echo", 2.5)
    assert (told.peer, told.operation, told.elapsed_s) == ("a:1", "echo", 2.5)
    assert locate(told, "b:2", "other", 9.0) is told
    assert (told.peer, told.operation, told.elapsed_s) == ("a:1", "echo", 2.5)
