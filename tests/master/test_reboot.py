"""A host that is started anew: what lies on disks is there again, and what lay in memory is not."""

import signal

import numpy as np
import pytest

from mooncake_store import Client, NotFoundError
from mooncake_store.errors import StoreError
from mooncake_store.journal.ring_file import remove_rings
from tests.master.test_programs import ready
from tests.master.wires import ClusterWire
from tests.waiting import until

pytestmark = pytest.mark.slow

MIB = 1 << 20
KEYS = [f"key/{number:02d}" for number in range(40)]
HERE, ANEW = ("-m", "mooncake_store"), ("-m", "tests.master.rebooted")


def value_of(key, size=100_000):
    """Bytes that belong to a key and to no other."""
    return np.random.default_rng(int(key[-2:]) + size).bytes(size)


class Host:
    """A master and a worker that lends memory and a file, on a host that can be started anew."""

    def __init__(self, start_program, folder, port, *flags):
        self._start, self._flags = start_program, flags
        self.state, self.memory, self.disk = (folder / name for name in ("state", "shm", "disk"))
        self.memory.mkdir()
        self.disk.mkdir()
        self.port, self.programs = port, []
        self.url = f"mooncake://127.0.0.1:{port}/default"

    def start(self, command):
        """Start both, and wait until what the worker has is to be read."""
        master = (
            "master", "--port", self.port, "--state", self.state, "--json",
            "--journal", "synced", "--ping-interval", "200ms", "--client-ttl", "600s",
            "--default-lease-ttl", "100ms", *self._flags,
        )  # fmt: skip
        worker = (
            "worker", "--master", f"127.0.0.1:{self.port}", "--name", "w", "--json",
            "--memory", self.memory, "--segment", "16MiB",
            "--segment", f"file:{self.disk}/pool,32MiB",
        )  # fmt: skip
        self.programs = []
        for arguments in (master, worker):
            self.programs.append(self._start(*command, *arguments))
            ready(self.programs[-1])
        wire = ClusterWire(f"127.0.0.1:{self.port}")
        until(lambda: [s.state for s in wire.segments()] == [1, 1], what="both are mounted")
        wire.close()

    def end(self, number):
        """End all that runs, and with the host what was in its memory."""
        for program in reversed(self.programs):
            program.signal(number)
            program.wait()
        for path in self.memory.iterdir():
            path.unlink()
        remove_rings(self.state / "shard-0")


@pytest.fixture
def host(tmp_path, start_program, free_port):
    return Host(start_program, tmp_path, free_port)


def fill(client):
    """Put objects, the even ones on the disk."""
    for number, key in enumerate(KEYS):
        client.put(key, value_of(key), preferred=["w-1" if number % 2 == 0 else "w-0"])
    on_disk = [key for key in KEYS if client.query(key).replicas[0].segment == "w-1"]
    assert on_disk == KEYS[::2]


def found(client, keys):
    """Which objects are there; fails for bytes that are not the object's."""
    there = []
    for key in keys:
        try:
            assert client.get(key) == value_of(key), f"{key} has other bytes"
            there.append(key)
        except StoreError:
            continue
    return there


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_what_lies_on_disks_survives_a_start_of_the_host(host, number):
    host.start(HERE)
    with Client(host.url) as client:
        fill(client)
        client.remove(KEYS[0], force=True)
    host.end(number)
    host.start(ANEW)
    with Client(host.url) as client:
        assert found(client, KEYS) == KEYS[2::2]
        with pytest.raises(NotFoundError):
            client.get(KEYS[1])
        client.put("new", value_of("new/01", MIB), preferred=["w-0"])
        assert client.get("new") == value_of("new/01", MIB)


def test_what_a_disk_lost_meanwhile_is_not_read(host):
    host.start(HERE)
    with Client(host.url) as client:
        fill(client)
    host.end(signal.SIGKILL)
    pool = host.disk / "pool"
    content = pool.read_bytes()
    at = content.index(value_of(KEYS[4]))
    with pool.open("r+b") as file:
        file.seek(at + 50_000)
        file.write(bytes(4096))
    host.start(ANEW)
    with Client(host.url) as client:
        assert found(client, KEYS) == [key for key in KEYS[::2] if key != KEYS[4]]
