"""Real etcd and Redis for tests: each in a process of its own, on a free port, on loopback."""

import shutil
import socket
import subprocess
from contextlib import contextmanager

import pytest

from tests.waiting import until


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def accepts(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def process(package, *command, port):
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"{command[0]} is not installed: apt install {package}")
    child = subprocess.Popen(
        [program, *command[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: accepts(port), 30, f"{command[0]} accepts connections")
        yield child
    finally:
        child.kill()
        child.wait(60)


@contextmanager
def etcd(folder):
    port, peer = free_port(), free_port()
    here, there = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = [
        "etcd", "--data-dir", str(folder), "--unsafe-no-fsync",
        "--listen-client-urls", here, "--advertise-client-urls", here,
        "--listen-peer-urls", there, "--initial-advertise-peer-urls", there,
        "--initial-cluster", f"default={there}",
    ]  # fmt: skip
    with process("etcd-server", *command, port=port) as child:
        yield f"127.0.0.1:{port}", child


@contextmanager
def redis(folder, *options):
    port = free_port()
    command = [
        "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "",
        "--dir", str(folder), *options,
    ]  # fmt: skip
    with process("redis-server", *command, port=port) as child:
        yield f"127.0.0.1:{port}", child
