"""Every HTTP server of ours serves on, whatever strangers do at its port."""

import contextlib
import http.client
import os
import resource
import socket
import subprocess
import sys

import pytest

from tests.strangers import Crowd, descriptors, reset
from tests.waiting import PATIENCE_S, until
from transfer_engine.rpc.entrance import PER_ADDRESS_MAX

PROGRAM = "tests.serving.front.http_program"
FREE = 8


@pytest.fixture
def started():
    """Start a server in a process of its own: (process, port)."""
    running = []

    def start(kind):
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, kind], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"MOONCAKE_MASTER": "127.0.0.1:1"},
        )  # fmt: skip
        running.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in running:
        with process:
            process.kill()


def answers(port):
    """Whether somebody new gets an answer, whatever it says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection), contextlib.suppress(ConnectionError):
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    return False


@pytest.mark.parametrize("kind", ["control", "front", "rest"])
def test_a_server_outlives_a_port_scan_and_strangers_keep_nobody_out(started, kind):
    """More than there are places for, then more than it has descriptors: who asks is answered."""
    process, port = started(kind)
    assert answers(port)
    for _ in range(300):
        reset("127.0.0.1", port)
    until(lambda: answers(port))  # resets that it has yet to notice may have all its places
    before = descriptors(process.pid)
    with Crowd(lambda: socket.create_connection(("127.0.0.1", port))) as strangers:
        for _ in range(300):
            strangers.come(b"GET / HTTP/1.1\r\nX-Half: ")
        assert answers(port)
        assert strangers.left() <= PER_ADDRESS_MAX
    until(lambda: descriptors(process.pid) <= before)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (before + FREE, before + FREE))
    with Crowd(lambda: socket.create_connection(("127.0.0.1", port))) as strangers:
        for _ in range(3 * FREE):
            strangers.come()
        assert answers(port)
    until(lambda: descriptors(process.pid) <= before)
    assert process.poll() is None
