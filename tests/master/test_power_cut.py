"""A host that loses power while its journal lags behind its disks: what was removed is back.

Its place may be another's by then. Nobody gets the other's bytes, whichever way and however little
of the object is read.
"""

import signal
import socket
import time

import numpy as np
import pytest

from mooncake_store import Client, Pieces
from mooncake_store.client import unsure
from mooncake_store.compat import MooncakeDistributedStore
from mooncake_store.core.records import Tier
from mooncake_store.errors import NotFoundError, StoreError, TooSlowError
from mooncake_store.fs import MooncakeFileSystem
from mooncake_store.wire.shard import SUBMIT_TASK, SubmitTask
from tests.conftest import programs
from tests.master.test_reboot import ANEW, HERE, Host, value_of
from tests.master.test_worker import FAILED, SUCCESS
from tests.master.wires import ClusterWire
from tests.waiting import until

pytestmark = pytest.mark.slow

SIZE = 100_000
TAKEN = [f"old/{number:02d}" for number in range(4)]
"""Removed in the moments that are lost, and others lie there."""
KEPT = [f"old/{number:02d}" for number in range(4, 8)]
OTHERS = [f"new/{number:02d}" for number in range(20, 24)]
OFFSET, LENGTH = 30_000, 500


programs = pytest.fixture(scope="module")(programs)


@pytest.fixture(scope="module")
def host(tmp_path_factory, programs):
    """A host after the cut: KEPT are as they were, and OTHERS lie where TAKEN did."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Without promotions: a worker that read all of one of TAKEN would have it gone.
    host = Host(programs, tmp_path_factory.mktemp("cut"), port, "--promotion-hits", "0")
    host.start(HERE)
    with Client(host.url) as client:
        for key in TAKEN + KEPT:
            client.put(key, value_of(key, SIZE), preferred=["w-1"])
        places = {client.query(key).replicas[0].offset for key in TAKEN}
        shard = host.state / "shard-0"
        as_it_was = {path: path.read_bytes() for path in shard.iterdir() if path.is_file()}
        for key in TAKEN:
            client.remove(key, force=True)
        for key in OTHERS:
            client.put(key, value_of(key, SIZE), preferred=["w-1"])
        assert {client.query(key).replicas[0].offset for key in OTHERS} == places
    host.end(signal.SIGKILL)
    for path in shard.iterdir():
        if path.is_file() and path not in as_it_was:
            path.unlink()
    for path, content in as_it_was.items():
        path.write_bytes(content)
    host.start(ANEW)
    yield host
    host.end(signal.SIGKILL)


def whole(client, key):
    return client.get(key), slice(None)


def unverified(client, key):
    return client.get(key, verify=False), slice(None)


def a_range(client, key):
    return client.get_range(key, OFFSET, LENGTH), slice(OFFSET, OFFSET + LENGTH)


def to_the_end(client, key):
    return client.get_range(key, OFFSET), slice(OFFSET, None)


def all_of_it(client, key):
    return client.get_range(key, 0, SIZE, verify=False), slice(None)


def into_memory(client, key):
    buffer = bytearray(LENGTH)
    assert client.get_into(key, buffer, offset=OFFSET, length=LENGTH) == LENGTH
    return bytes(buffer), slice(OFFSET, OFFSET + LENGTH)


def a_view(client, key):
    with client.view(key, verify=False) as view:
        return bytes(view.data), slice(None)


def under_a_lease(client, key):
    client.lease_many([key])
    return a_range(client, key)


WAYS = [whole, unverified, a_range, to_the_end, all_of_it, into_memory, a_view, under_a_lease]


@pytest.mark.parametrize("transports", [("local", "shm", "file"), ("tcp",)], ids=["here", "tcp"])
@pytest.mark.parametrize("way", WAYS)
def test_no_bytes_of_another_are_read(host, transports, way):
    with Client(host.url, transports=transports) as client:
        for key in KEPT:
            for _ in range(2):
                value, part = way(client, key)
                assert value == value_of(key, SIZE)[part]
        for key in TAKEN:
            with pytest.raises(StoreError, match="checksum"):
                way(client, key)


def bytes_read(client):
    return sum(client.stats().bytes_read.values())


def test_many_ranges_of_an_object_cost_one_reading_of_it(host):
    with Client(host.url) as client:
        for start in range(0, SIZE - LENGTH, 10 * LENGTH):
            got = client.get_range(KEPT[0], start, LENGTH)
            assert got == value_of(KEPT[0], SIZE)[start : start + LENGTH]
        assert bytes_read(client) == SIZE
        with pytest.raises(StoreError, match="bytes"):
            client.get_range(KEPT[0], SIZE, LENGTH)
        # Several at once are kept together.
        for _ in range(3):
            target = np.zeros((len(KEPT), LENGTH), np.uint8)
            addresses = [[row.ctypes.data] for row in target]
            pieces = Pieces.of(addresses, [[LENGTH]] * len(KEPT), [[OFFSET]] * len(KEPT))
            assert not client.get_into_many(KEPT, pieces).statuses.any()
            for key, row in zip(KEPT, target, strict=True):
                assert row.tobytes() == value_of(key, SIZE)[OFFSET : OFFSET + LENGTH]
        assert bytes_read(client) == len(KEPT) * SIZE


def test_a_range_is_worth_what_its_whole_object_takes(host):
    """But for one that is cut out of what was read just now."""
    with Client(host.url, transports=("tcp",)) as client:
        byte_s = 1 / (SIZE // 2)
        slow = {
            ("tcp", tier): ((0.0, 0.0, byte_s), (0.0, 0.0, byte_s), (1.0, 0.0)) for tier in Tier
        }
        client._core.directory.costs.expect(slow, time.monotonic())
        with pytest.raises(TooSlowError):
            client.get_range(KEPT[0], OFFSET, LENGTH, worth="1s")
        assert bytes_read(client) == 0
        client.get_range(KEPT[0], OFFSET, LENGTH)
        client._core.directory.costs.expect(slow, time.monotonic())
        value = client.get_range(KEPT[0], 0, LENGTH, worth="1s")
        assert value == value_of(KEPT[0], SIZE)[:LENGTH]


def test_what_is_too_large_to_be_kept_is_read_each_time(host, monkeypatch):
    monkeypatch.setattr(unsure, "HELD_BYTES", SIZE - 1)
    with Client(host.url) as client:
        for _ in range(3):
            value = client.get_range(KEPT[0], OFFSET, LENGTH)
            assert value == value_of(KEPT[0], SIZE)[OFFSET : OFFSET + LENGTH]
        assert bytes_read(client) == 3 * SIZE


def test_no_pieces_of_another_are_read(host):
    keys = TAKEN + KEPT
    target = np.zeros((len(keys), 2 * LENGTH), np.uint8)
    addresses = [[row.ctypes.data, row.ctypes.data + LENGTH] for row in target]
    lengths, starts = [[LENGTH] * 2] * len(keys), [[10, OFFSET]] * len(keys)
    with Client(host.url) as client:
        pieces = Pieces.of(addresses, lengths, starts)
        got = client.get_into_many(keys, pieces)
    assert (got.statuses != 0).tolist() == [True] * len(TAKEN) + [False] * len(KEPT)
    for key, row in zip(KEPT, target[len(TAKEN) :], strict=True):
        value = value_of(key, SIZE)
        assert row.tobytes() == value[10 : 10 + LENGTH] + value[OFFSET : OFFSET + LENGTH]
    assert not target[: len(TAKEN)].any()


def test_no_copy_of_another_is_made(host):
    wire = ClusterWire(f"127.0.0.1:{host.port}")
    shard = wire.shard()
    memory = next(each.number for each in wire.segments() if each.name == "w-0")
    tasks = []
    with Client(host.url) as client:
        for key in TAKEN[0], KEPT[0]:
            digest = client._core.identity.digest(key)
            request = SubmitTask(0, digest, (memory,), -1)
            tasks.append(shard.cold(SUBMIT_TASK, request).number)
        ended = [until(lambda task=task: (now := shard.task(task)).state > 1 and now)
                 for task in tasks]  # fmt: skip
        assert [task.state for task in ended] == [FAILED, SUCCESS]
        assert len(client.query(TAKEN[0]).replicas) == 1
        assert len(client.query(KEPT[0]).replicas) == 2
        assert client.get_range(KEPT[0], OFFSET) == value_of(KEPT[0], SIZE)[OFFSET:]
    shard.close()
    wire.close()


def test_no_part_of_another_file_is_read(host):
    fs = MooncakeFileSystem(host.url, skip_instance_cache=True)
    ends = OFFSET + LENGTH
    got = fs.cat_ranges(TAKEN + KEPT, OFFSET, ends, on_error="return")
    assert all(isinstance(value, Exception) for value in got[: len(TAKEN)])
    assert got[len(TAKEN) :] == [value_of(key, SIZE)[OFFSET:ends] for key in KEPT]
    fs.close()


def test_no_part_of_another_is_read_through_the_drop_in_api(host):
    store = MooncakeDistributedStore()
    master = f"127.0.0.1:{host.port}"
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", master) == 0
    buffer = np.zeros(LENGTH, np.uint8)
    store.register_buffer(buffer.ctypes.data, LENGTH)
    for key in TAKEN + KEPT:
        ((answers,),) = store.get_into_ranges(
            [buffer.ctypes.data], [[key]], [[[0]]], [[[OFFSET]]], [[[LENGTH]]]
        )
        if key in KEPT:
            assert answers == [LENGTH]
            assert buffer.tobytes() == value_of(key, SIZE)[OFFSET : OFFSET + LENGTH]
        else:
            assert answers[0] < 0
    store.close()


def test_what_replaced_an_object_or_is_gone_is_not_read_as_it_was(host):
    key = KEPT[-1]
    old, new = value_of(key, SIZE), value_of(OTHERS[0], SIZE)
    with Client(host.url) as reader, Client(host.url) as writer:
        assert reader.get_range(key, OFFSET, LENGTH) == old[OFFSET : OFFSET + LENGTH]
        writer.remove(key, force=True)
        with pytest.raises(NotFoundError):
            reader.get_range(key, OFFSET, LENGTH)
        writer.put(key, new)
        assert reader.get_range(key, OFFSET, LENGTH) == new[OFFSET : OFFSET + LENGTH]
        writer.put(key, old, upsert=True)  # as other tests expect it
