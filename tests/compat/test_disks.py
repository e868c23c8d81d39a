"""A store that lends a disk beside its memory, where the original's clients write files."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from mooncake_store import LocalCluster
from mooncake_store.compat import MooncakeDistributedStore
from tests.waiting import until

MIB = 1 << 20


@pytest.fixture(scope="module")
def master():
    """What --enable_offload, --offload_on_evict and --promotion_on_hit set."""
    settings = {"offload": "evict", "promotion_hits": 2}
    with LocalCluster(workers=0, master=settings) as running:
        yield running.address


@pytest.fixture
def with_disk(make, tmp_path, monkeypatch):
    """Set a store up that lends a disk of so many bytes."""

    def set_up(disk=64 * MIB, **changes):
        monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(disk))
        given = {"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path)}
        return make(**given | changes)

    return set_up


def kinds(store, key):
    """Where the replicas of an object lie."""
    return {
        "memory" if replica.is_memory_replica() else "disk"
        for replica in store.get_replica_desc(key)
    }


def is_relieved(store):
    """Whether memory is below its watermark, and nothing is on its way."""
    (shard,) = store.client.store_stats()
    used = shard.bytes_allocated - shard.disk_allocated
    return not shard.hauls_unfinished and used <= 0.9 * (shard.bytes_total - shard.disk_total)


def sink(store, key):
    """Have an object leave memory for the disk, by others that need its place."""
    for at in range(24):
        assert store.put(f"{key}-filler-{at}", bytes([at]) * MIB) == 0
        # Who asks where the object lies uses it, so this only waits until there is room again.
        until(lambda: is_relieved(store))
    until(lambda: kinds(store, key) == {"disk"})


def test_what_leaves_memory_lies_on_the_disk_and_is_read_from_there(with_disk):
    store = with_disk()
    value = os.urandom(MIB)
    assert store.put("cold", value) == 0
    assert kinds(store, "cold") == {"memory"}
    sink(store, "cold")
    (replica,) = store.get_replica_desc("cold")
    assert replica.is_local_disk_replica()
    assert not replica.is_disk_replica()
    with pytest.raises(RuntimeError):
        replica.get_memory_descriptor()
    before = store.get_offload_rpc_read_count()
    assert store.get("cold") == value
    assert store.get_batch(["cold", "none"]) == [value, b""]
    assert store.get_offload_rpc_read_count() == before + 2


def test_what_is_read_again_comes_back_and_is_read_from_memory(with_disk):
    store = with_disk()
    value = os.urandom(MIB)
    assert store.put("warm", value) == 0
    sink(store, "warm")

    def risen():
        # Each get asks the master, which counts: what is leased is read without a request.
        assert store.client.get("warm", ttl=0.001) == value
        return kinds(store, "warm") == {"memory", "disk"}

    def read_from_memory():
        before = store.get_offload_rpc_read_count()
        assert store.client.get("warm", ttl=0.001) == value
        return store.get_offload_rpc_read_count() == before

    until(risen)
    until(read_from_memory)  # the lease of a read just before may still name the disk


def test_a_small_load_stays_in_memory_alone(with_disk):
    store = with_disk()
    keys = [f"small-{at}" for at in range(16)]
    assert store.put_batch(keys, [key.encode() for key in keys]) == 0
    until(lambda: is_relieved(store))
    assert [kinds(store, key) for key in keys] == [{"memory"}] * 16
    assert store.get_offload_rpc_read_count() == 0


def test_a_disk_is_taken_back_with_what_lies_on_it_and_leaves_no_file(with_disk, tmp_path):
    store = with_disk()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 64 * MIB
    store.put("cold", bytes(MIB))
    sink(store, "cold")
    store.put("hot", b"value")
    assert store.unmount_local_disk_segment() == 0
    assert list(tmp_path.iterdir()) == []
    assert store.get("cold") == b""
    assert store.get("hot") == b"value"
    assert store.unmount_local_disk_segment() == 0  # there is none any more
    store.close()


def test_within_the_grace_period_objects_go_to_the_disks_of_others(with_disk, make):
    store = with_disk()
    value = os.urandom(MIB)
    store.put("cold", value)
    sink(store, "cold")
    other = with_disk(global_segment_size=0)
    assert store.unmount_local_disk_segment(grace_period_seconds=60) == 0
    assert other.get("cold") == value
    store.close()


def test_the_variables_of_the_original_say_where_and_how_much(make, tmp_path, monkeypatch):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(tmp_path))
    make(enable_ssd_offload="true")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 160 * MIB  # ten times the memory
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(8 * MIB))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE", str(4 * MIB))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_MAX_PHYSICAL_BYTES", "0")
    make(enable_ssd_offload=True)
    (second,) = set(tmp_path.iterdir()) - {file}
    assert second.stat().st_size == 4 * MIB
    make(enable_ssd_offload=False)
    assert len(list(tmp_path.iterdir())) == 2


def test_no_more_than_the_disk_has_is_taken(make, tmp_path, monkeypatch):
    from mooncake_store.compat import disks

    room = os.statvfs(tmp_path)
    monkeypatch.setattr(disks, "_FREE_SHARE", 10 * MIB / (room.f_bavail * room.f_frsize))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(1 << 60))
    make(enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert 8 * MIB < file.stat().st_size < 12 * MIB


@pytest.mark.parametrize("folder", ["relative", "/no/such/folder"])
def test_a_folder_that_is_none_fails_the_setup_and_leaves_nothing(master, folder):
    store = MooncakeDistributedStore()
    given = ("localhost", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", master)
    assert store.setup(*given, None, True, folder) < 0
    assert store.put("key", b"value") == -1
    assert store.setup(*given) == 0
    assert [s.nbytes for s in store.client.status().segments if "/disk" in s.name] == []
    store.close()


def test_a_disk_without_memory_wants_to_be_told_its_size(make, tmp_path, monkeypatch):
    given = {"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path), "segment": 0}
    make(**given)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(8 * MIB))
    store = make(**given)
    assert len(list(tmp_path.iterdir())) == 1
    assert store.put("key", b"value") == 0  # while no memory is there disks take puts
    assert kinds(store, "key") == {"disk"}
    assert store.get("key") == b"value"


LENDS = """
import sys
from mooncake_store.compat import MooncakeDistributedStore
store = MooncakeDistributedStore()
master, folder = sys.argv[1:]
given = ("localhost", "P2PHANDSHAKE", 1 << 24, 1 << 24, "tcp", "", master)
assert store.setup(*given, None, True, folder) == 0
print("lent", flush=True)
sys.stdin.read()
"""


def test_the_file_of_a_killed_program_goes_with_the_next_one_and_that_of_a_live_one_does_not(
    master, make, tmp_path
):
    def lend():
        program = subprocess.Popen(
            [sys.executable, "-c", LENDS, master, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert program.stdout.readline() == "lent\n"
        return program

    with lend() as killed, lend() as alive:
        files = set(tmp_path.iterdir())
        assert len(files) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        (left,) = [file for file in files if f"-{killed.pid}-" in file.name]
        (kept,) = files - {left}
        store = make(enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
        assert not left.exists()
        assert kept.exists()
        alive.stdin.close()
        assert alive.wait(60) == 0
    assert not kept.exists()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_killed_program_goes_whatever_has_its_number_by_now(make, tmp_path):
    """In a container each program has the number of the one before it: 1, mostly."""
    left = [tmp_path / f"mooncake-{pid}-0123456789abcdef.segment" for pid in (1, os.getpid())]
    for path in left:
        path.write_bytes(b"left")
    other = tmp_path / "mooncake-1-notes.segment"
    other.touch()
    make(enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    assert not any(path.exists() for path in left)
    assert other.exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_removed_while_another_program_makes_its_file(make, tmp_path):
    """It is not locked yet, and its process may be one of another container."""
    path = tmp_path / "mooncake-99999999-0123456789abcdef.segment"
    path.touch()
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    make(enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    assert path.exists()
    os.close(held)
    make(enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    assert not path.exists()


def test_a_folder_that_another_program_does_not_leave_fails_the_setup(
    master, tmp_path, monkeypatch
):
    from mooncake_store.compat import disks

    monkeypatch.setattr(disks, "CLEANING_S", 0.05)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    store = MooncakeDistributedStore()
    given = ("localhost", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", master)
    assert store.setup(*given, None, True, str(tmp_path)) < 0
    assert list(tmp_path.iterdir()) == []
    os.close(held)
    assert store.setup(*given, None, True, str(tmp_path)) == 0
    store.close()
