"""Workers that lend files: settings, programs of their own, and what happens to the files."""

import fcntl
import logging
import os
import signal

import numpy as np
import pytest

from mooncake_store import Client, LocalCluster, TruncatedError
from mooncake_store.cli.worker import _lent
from mooncake_store.config.settings import WorkerConfig
from mooncake_store.errors import ConfigError
from mooncake_store.worker.segments import Place, WorkerSegments, parse_place
from tests.master.test_programs import MASTER, WORKER, ready
from tests.master.wires import ClusterWire
from transfer_engine import FileSegment, SegmentDescriptor

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/mnt/pool:64MiB", Place("/mnt/pool", 64 * MIB)),
        ("/mnt/a:b/pool:64MiB", Place("/mnt/a:b/pool", 64 * MIB)),
        ("/mnt/a:b", Place("/mnt/a:b", None)),
        ("/dev/dax0.0", Place("/dev/dax0.0", None)),
    ],
)
def test_a_place_is_a_path_and_perhaps_a_size(text, place):
    assert parse_place(text) == place


def test_a_place_that_is_no_absolute_path_is_refused():
    for text in ("pool:64MiB", "64MiB", "", ":1GiB"):
        with pytest.raises(ConfigError, match="absolute path"):
            parse_place(text)


def test_the_command_line_sorts_memory_from_files():
    assert _lent({"files": ["/c:1GiB"]}) == {"files": ["/c:1GiB"]}
    assert _lent({"segments": ["16GiB", "file:/a,b,1GiB", "/dev/dax0.0", "1GiB"]}) == {
        "segments": ["16GiB", "1GiB"],
        "files": ["/a,b:1GiB", "/dev/dax0.0"],
    }


@pytest.fixture
def lend(tmp_path):
    made = []

    def make(*files, **settings):
        config = WorkerConfig(files=files, segments_bytes=(), **settings)
        lending = WorkerSegments(config, "w")
        made.append(lending)
        return lending

    yield make
    for lending in made:
        lending.close()


def test_files_are_created_reused_and_held_by_one_worker(lend, tmp_path):
    path = tmp_path / "pool"
    first = lend(f"{path}:2MiB")
    first.make()
    (segment,) = first.segments
    assert isinstance(segment, FileSegment)
    assert (segment.size, segment.name, path.stat().st_blocks * 512 >= 2 * MIB) == (
        2 * MIB, "w", True,
    )  # fmt: skip
    second = lend(f"{path}:1MiB")
    with pytest.raises(ConfigError, match="another process lends"):
        second.make()
    first.close()
    second.make()
    assert second.segments[0].size == MIB
    assert path.stat().st_size == 2 * MIB


def test_what_cannot_be_lent_is_said_with_its_path(lend, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no .*/pool"):
        lend(f"{tmp_path}/pool").make()
    (tmp_path / "small").write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="small"):
        lend(f"{tmp_path}/small:1MiB").make()


def test_an_object_behind_the_end_of_a_shortened_file_says_so(tmp_path):
    path = tmp_path / "pool"
    worker = {"files": [f"{path}:16MiB"], "segments": []}
    with LocalCluster(worker=worker) as cluster, Client(cluster.url) as store:
        store.put("key", b"\1" * MIB)
        os.truncate(path, 0)
        with pytest.raises(TruncatedError, match="file") as caught:
            store.get("key")
        assert caught.value.key == "key"
        assert isinstance(store.get_many(["key"]).error(0), TruncatedError)


def test_a_new_master_gets_a_new_file(lend, tmp_path):
    path = tmp_path / "pool"
    lending = lend(f"{path}:1MiB")
    lending.make()
    old = lending.segments[0]
    inode, uuid = path.stat().st_ino, old.uuid
    with open(path, "rb") as before:
        lending.replace("cluster", 2, 2)
        assert (path.stat().st_ino, lending.segments[0].uuid) != (inode, uuid)
        assert os.fstat(before.fileno()).st_nlink == 0


def test_a_device_is_left_out_when_the_master_is_new(lend, tmp_path, caplog):
    path = tmp_path / "pool"
    lending = lend(f"{path}:1MiB")
    lending.make()
    lending._places.append(Place("/dev/full", MIB))
    with caplog.at_level(logging.WARNING):
        lending.replace("cluster", 2, 2)
    assert [segment.size for segment in lending.segments] == [MIB]
    assert "/dev/full is not lent any more" in caplog.text


def test_rails_are_refused_without_tcp_or_without_a_secret():
    for settings, what in (
        ({"rails": ("127.0.0.2",), "transports": ("shm",)}, "addresses for tcp"),
        ({"rails": ("10.0.0.1",)}, "secret"),
        ({"rails": ("127.0.0.2:x",)}, "not an address"),
        ({"rails": ("127.0.0.2", "127.0.0.2")}, "more than once"),
    ):
        with pytest.raises(ConfigError, match=what):
            WorkerConfig(**settings).check()


def test_a_file_and_two_networks_end_to_end(start_program, tmp_path):
    """Bytes that were put lie in the file, are read back, and move to memory on leaving."""
    master = start_program(*MASTER, "--port", 0, "--json")
    address = ready(master)["address"]
    path = tmp_path / "pool"
    worker = start_program(
        *WORKER, "--master", address, "--segment", f"file:{path},16MiB", "--rail", "127.0.0.2",
        "--drain", "20s", "--name", "disk", "--json",
    )  # fmt: skip
    facts = ready(worker)
    assert facts["bytes"] == 16 * MIB
    wire = ClusterWire(address)
    (segment,) = wire.segments()
    descriptor = SegmentDescriptor.decode(segment.descriptor)
    assert set(descriptor.transports) == {"file", "tcp"}
    assert [rail.partition(":")[0] for rail in descriptor.rails] == ["127.0.0.2"]
    rng = np.random.default_rng(1)
    values = {f"key-{n}": rng.bytes(300_000 + n) for n in range(8)}
    with Client(f"mooncake://{address}/default") as client:
        for key, value in values.items():
            client.put(key, value)
        assert {key: client.get(key) for key in values} == values
        assert all(value in path.read_bytes() for value in values.values())
        with open(path, "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        memory = start_program(
            *WORKER, "--master", address, "--segment", "32MiB", "--name", "memory", "--json"
        )
        ready(memory)
        worker.signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        assert {key: client.get(key) for key in values} == values
    assert [segment.nbytes for segment in wire.segments()] == [32 * MIB]
    assert path.exists()
    wire.close()
    for program in (memory, master):
        program.signal(signal.SIGTERM)
        assert program.wait(30) == 0
