"""Every HTTP server of ours serves on after a port scan, and after it had no descriptors left."""

import contextlib
import http.client
import os
import resource
import socket
import subprocess
import sys

import pytest

from tests.strangers import descriptors, reset
from tests.waiting import PATIENCE_S, until

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
def test_a_server_outlives_a_port_scan_and_a_want_of_descriptors(started, kind):
    process, port = started(kind)
    assert answers(port)
    for _ in range(300):
        reset("127.0.0.1", port)
    until(lambda: answers(port))  # resets that it has yet to notice may have all its places
    before = descriptors(process.pid)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (before + FREE, before + FREE))
    with contextlib.ExitStack() as strangers:
        for _ in range(3 * FREE):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: descriptors(process.pid) >= before + FREE)
    until(lambda: answers(port))
    until(lambda: descriptors(process.pid) <= before)
    assert process.poll() is None
