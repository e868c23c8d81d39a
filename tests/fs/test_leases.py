"""Open files under pressure: what is read stays, what rested too long is missed, never wrong."""

import time
from types import SimpleNamespace

import pytest

from mooncake_store import LocalCluster
from mooncake_store.errors import UnavailableError
from mooncake_store.fs import MooncakeFileSystem, files
from tests.fs.test_files import content
from tests.waiting import until

PART = 1 << 20
SIZE = 12 * PART + 77


@pytest.fixture(scope="module")
def small_cluster():
    with LocalCluster(workers=1, segment="80MB") as running:  # long leases of one: 15 of it
        yield running


@pytest.fixture
def fs(small_cluster, request):
    url = f"mooncake://{small_cluster.address}/{request.node.name[:60]}"
    # Views of single parts last for the deadline.
    made = MooncakeFileSystem(
        url, part_size=PART, pin=None, deadline="4s", skip_instance_cache=True
    )
    yield made
    made.rm("", recursive=True)
    made.close()


@pytest.fixture
def squeeze(small_cluster):
    """Return a function that writes three times what the pool holds."""
    other = MooncakeFileSystem(
        f"mooncake://{small_cluster.address}/squeeze", pin=None, skip_instance_cache=True
    )

    def write():
        for number in range(60):
            other.pipe_file(f"file-{number}", bytes(4 << 20))

    yield write
    other.close()


@pytest.fixture
def short_leases(monkeypatch):
    monkeypatch.setattr(files, "_LEASE_S", 0.9)
    monkeypatch.setattr(files, "_RENEW_BELOW_S", 0.6)


def parts_of(fs):
    return [item.key for item in fs.client.list("\0")]


def test_all_parts_of_an_open_file_outlast_pressure_and_go_after_it(fs, squeeze):
    data = content(SIZE)
    fs.pipe_file("file", data)
    with fs.open("file") as file:
        assert file.read(1) == data[:1]
        assert all(fs.client.stat(key).lease_s > 20 for key in parts_of(fs))
        squeeze()
        assert file.read() == data[1:]
    assert all(fs.client.stat(key).lease_s == 0 for key in parts_of(fs))
    squeeze()
    with pytest.raises(FileNotFoundError):
        fs.open("file")


def test_a_file_that_is_read_for_long_renews_its_leases(fs, squeeze, monkeypatch):
    ahead = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr(files, "time", clock)
    data = content(SIZE)
    fs.pipe_file("file", data)
    with fs.open("file") as file:
        read, former = bytearray(file.read(100)), files._LEASE_S
        for lease_s in (100.0, 200.0, 300.0):
            # Longer than the former, so that the store shows which of them it granted.
            monkeypatch.setattr(files, "_LEASE_S", lease_s)
            ahead += former
            read += file.read(2 * PART)
            assert all(fs.client.stat(key).lease_s > former for key in parts_of(fs))
            squeeze()
            former = lease_s
        assert read + file.read() == data


@pytest.mark.parametrize("size", [1000, SIZE])
def test_a_file_that_rested_too_long_is_missed_and_never_wrong(fs, squeeze, short_leases, size):
    fs.pipe_file("file", content(size))
    keys = parts_of(fs) or ["file"]
    assert all(fs.client.stat(key).soft_pin_s == 0 for key in keys)
    with fs.open("file") as file:
        assert file.read(10) == content(size)[:10]
        until(lambda: all(fs.client.stat(key).lease_s == 0 for key in keys))
        squeeze()
        assert not fs.client.exists_many(keys).all()
        with pytest.raises(FileNotFoundError, match="while it was open"):
            file.read()


def test_a_file_with_a_part_missing_does_not_open(fs):
    fs.pipe_file("file", content(SIZE))
    fs.client.remove(parts_of(fs)[3])
    with pytest.raises(FileNotFoundError):
        fs.open("file")


def test_who_closes_a_file_leaves_the_leases_of_others(fs):
    fs.pipe_file("file", content(SIZE))
    with fs.open("file") as one:
        with fs.open("file") as other:
            assert other.read() == content(SIZE)
        assert all(fs.client.stat(key).lease_s > 0 for key in parts_of(fs))
        assert one.read() == content(SIZE)
    assert all(fs.client.stat(key).lease_s == 0 for key in parts_of(fs))


def test_a_store_that_cannot_lease_is_not_a_file_that_is_gone(fs, monkeypatch):
    fs.pipe_file("file", bytes(5 * PART))
    refused = UnavailableError("a shard is away")
    away = SimpleNamespace(ok=False, errors=lambda: iter([(3, refused)]))
    monkeypatch.setattr(fs.client, "lease_many", lambda *_, **__: away)
    with pytest.raises(UnavailableError, match="a shard is away"):
        fs.open("file")
