"""Files that cannot fit: what is there already stays, and whoever writes is told in time."""

import errno
import os
from contextlib import closing

import pytest

from mooncake_store import Client, LocalCluster, ids
from mooncake_store.errors import NoSpaceError, TransferTimeoutError
from mooncake_store.fs import MooncakeFileSystem

MIB = 1 << 20
KEPT = 24


@pytest.fixture(scope="module")
def pool():
    """A pool of 64 MiB."""
    with LocalCluster(2, "32MiB", in_process=True) as running:
        yield running


@pytest.fixture
def small(pool):
    """A filesystem of the small pool, with some files that are worth keeping."""
    made = MooncakeFileSystem(pool.url, part_size="1MiB", skip_instance_cache=True)
    made.rm("", recursive=True)
    made.pipe({f"kept/{number}": bytes([number]) * MIB for number in range(KEPT)})
    yield made
    made.client.pin_many([item.key for item in made.client.list("")], hard=False)
    made.rm("", recursive=True)
    made.close()


def kept(fs):
    return len(fs.find("kept"))


def evicted(fs):
    return sum(shard.evicted_objects for shard in fs.client.store_stats())


def write(fs, size, tmp_path, **options):
    with fs.open("large", "wb", **options) as file:
        file.write(bytes(size))


def pipe(fs, size, tmp_path):
    fs.pipe_file("large", bytes(size))


def pipe_many(fs, size, tmp_path):
    fs.pipe({f"many/{number}": bytes(MIB) for number in range(size // MIB)})


def upload(fs, size, tmp_path):
    source = tmp_path / "source"
    source.touch()
    os.truncate(source, size)
    fs.put_file(str(source), "large")


@pytest.mark.parametrize("how", [write, pipe, pipe_many, upload])
def test_a_known_size_that_cannot_fit_is_refused_before_anything_is_evicted(small, how, tmp_path):
    before = evicted(small)
    with pytest.raises(NoSpaceError, match=r"at most 57.*MiB could be had.*of 64MiB") as caught:
        how(small, 100 * MIB, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert evicted(small) == before
    assert kept(small) == KEPT
    assert not small.exists("large")
    assert small.client.list("\0") == []


def test_a_file_that_fits_takes_the_place_of_others(small):
    small.pipe_file("large", bytes(48 * MIB))
    assert small.info("large")["size"] == 48 * MIB
    assert kept(small) < KEPT


def test_a_stream_stops_where_all_that_may_be_evicted_would_not_do(small):
    file = small.open("large", "wb")
    written = 0

    def go_on():
        nonlocal written
        while True:
            written += file.write(bytes(MIB))

    # Just below the limit it may find first that its beginning had to go.
    with pytest.raises(NoSpaceError, match=r"could be had|beginning of the file was evicted"):
        go_on()
    assert 32 * MIB <= written <= 58 * MIB
    assert small.client.list("\0") == []  # what it had stored went at once
    with pytest.raises(ValueError, match="given up"):
        file.write(b"more")
    file.close()
    assert not small.exists("large")


def test_a_stream_whose_beginning_was_evicted_stops_at_its_next_part(small):
    file = small.open("large", "wb")
    for _ in range(8):
        file.write(bytes(MIB))
    first = sorted(item.key for item in small.client.list("\0"))[0]
    small.client.remove(first)
    with pytest.raises(NoSpaceError, match="beginning of the file was evicted"):
        file.write(bytes(MIB))
    assert small.client.list("\0") == []
    assert kept(small) == KEPT


def test_what_is_pinned_hard_leaves_less_room(small):
    small.client.pin_many([f"kept/{number}" for number in range(KEPT)], hard=True)
    with pytest.raises(NoSpaceError, match=r"at most 33.*with 24MiB pinned hard"):
        small.pipe_file("large", bytes(40 * MIB))
    assert kept(small) == KEPT


def test_a_file_that_cannot_be_pinned_hard_is_refused(small):
    with pytest.raises(NoSpaceError, match="at most 24MiB could be had"):
        small.pipe_file("large", bytes(40 * MIB), pin="hard")
    with pytest.raises(NoSpaceError, match="at most 24MiB could be had"):
        write(small, 40 * MIB, None, pin="hard")
    assert kept(small) == KEPT


def test_a_copy_that_cannot_fit_evicts_nothing(small, pool):
    # Without these no segment is so full that the shard evicts by itself, a little later.
    small.rm([f"kept/{number}" for number in range(KEPT // 2)])
    small.pipe_file("source", bytes(30 * MIB))
    parts = [item.key for item in small.client.list("\0")]
    with Client(pool.url) as other:  # one may not pin all that may be pinned
        assert small.client.pin_many(parts[:15], hard=True).ok
        assert other.pin_many(parts[15:], hard=True).ok
    before = evicted(small)
    with pytest.raises(NoSpaceError, match=r"30MiB cannot fit: at most 27.*MiB could be had"):
        small.cp("source", "copy")
    assert evicted(small) == before
    assert not small.exists("copy")


def test_a_file_that_could_not_be_replaced_has_its_old_content():
    settings = {"quotas": ["mine=8MiB"]}
    with LocalCluster(1, "64MiB", in_process=True, namespace="mine", master=settings) as running:
        fs = MooncakeFileSystem(running.url, part_size="1MiB", skip_instance_cache=True)
        old = os.urandom(3 * MIB)
        fs.pipe_file("file", old, pin="hard")
        used = sum(shard.tenant_bytes for shard in fs.client.store_stats())
        # All parts find room, the object that carries the name does not.
        with pytest.raises(NoSpaceError):
            fs.pipe_file("file", bytes(8 * MIB - used - 10))
        assert fs.cat_file("file") == old
        assert sum(shard.tenant_bytes for shard in fs.client.store_stats()) == used
        fs.close()


def test_a_quota_is_refused_before_anything_is_evicted():
    settings = {"quotas": ["mine=8MiB"]}
    with LocalCluster(1, "64MiB", in_process=True, namespace="mine", master=settings) as running:
        fs = MooncakeFileSystem(running.url, part_size="1MiB", pin=None, skip_instance_cache=True)
        fs.pipe({f"kept/{number}": bytes(MIB // 2) for number in range(8)})
        with pytest.raises(NoSpaceError, match=r"at most 8MiB could be had.*quota of 8MiB"):
            fs.pipe_file("large", bytes(9 * MIB))
        assert len(fs.find("kept")) == 8
        fs.pipe_file("large", bytes(7 * MIB))
        fs.close()


def test_a_file_that_finds_no_room_at_its_new_name_keeps_the_old_one():
    """The new name belongs to another shard, which is full of what is being read."""
    options = {"part_size": "8MiB", "pin": None, "skip_instance_cache": True}
    with (
        LocalCluster(1, "32MiB", shards=2, in_process=True) as running,
        closing(MooncakeFileSystem(running.url, **options)) as fs,
        closing(MooncakeFileSystem(running.url, deadline="2s", **options)) as hurried,
    ):
        client = fs.client
        names = [f"name-{number}" for number in range(100)]
        shards = ids.shard_of(client.identity.digests(names), 2)
        here, there = (
            [name for name, shard in zip(names, shards, strict=True) if shard == number]
            for number in (0, 1)
        )
        source, target = here[0], there[0]
        content = os.urandom(5 * MIB)
        fs.pipe_file(source, content)
        read = there[1:14]
        assert client.put_many(read, [bytes(MIB)] * len(read)).ok
        assert client.lease_many(read, ttl="300s").ok
        with pytest.raises((NoSpaceError, TransferTimeoutError)):  # a busy shard may not say why
            hurried.mv(source, target)
        assert fs.cat_file(source) == content
        assert not fs.exists(target)
        client.release_many(read)
        fs.mv(source, target)
        assert fs.cat_file(target) == content
        assert not fs.exists(source)
