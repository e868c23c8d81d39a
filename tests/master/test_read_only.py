"""A credential that may read: what it reads, what it is refused, and how that is said."""

import pytest

from mooncake_store import LocalCluster
from mooncake_store.cli.main import main
from mooncake_store.client import Client
from mooncake_store.endpoint import read_secret
from mooncake_store.errors import AuthError, HasLeaseError
from mooncake_store.fs import MooncakeFileSystem
from mooncake_store.wire import shard as wire
from tests.client.test_leases import attack
from tests.master.wires import ClusterWire
from transfer_engine.wire.keyring import read_only_secret

MIB = 1 << 20
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secrets")
    made = {"full": SECRET, "reader": read_only_secret(SECRET.encode()).decode(), "other": "x" * 32}
    for name, text in made.items():
        (folder / name).write_text(text + "\n")
        (folder / name).chmod(0o600)
    return {name: str(folder / name) for name in made}


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(workers=1, segment="64MB", secret=SECRET.encode()) as running:
        yield running


@pytest.fixture
def writer(cluster, files):
    with Client(cluster.url, secret_file=files["full"]) as client:
        client.put_many(["one", "two"], [b"1" * 5000, b"2"])
        yield client


@pytest.fixture(params=["tcp", "shm"])
def reader(cluster, files, writer, request):
    with Client(
        cluster.url, secret_file=files["reader"], transports=[request.param], lease_ttl="1s"
    ) as client:
        yield client


def test_it_reads_and_lists(reader):
    assert reader.get("one") == b"1" * 5000
    assert reader.get_many(["one", "two"]).values == [b"1" * 5000, b"2"]
    assert reader.get_range("one", 4990) == b"1" * 10
    assert {item.key for item in reader.list()} >= {"one", "two"}
    assert reader.exists("two")
    assert reader.stat("two").size == 1
    assert reader.status().workers


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("put_start", lambda store: store.put("three", b"3")),
        ("put_start", lambda store: store.put_many(["three"], [b"3"]).check()),
        ("remove", lambda store: store.remove("one", force=True)),
        ("remove", lambda store: store.remove_many(["one"], force=True).check()),
        ("remove_matching", lambda store: store.clear(force=True)),
        ("rename", lambda store: store.rename("one", "three", force=True)),
        ("pin", lambda store: store.pin("one", hard=True)),
        ("hint", lambda store: store.hint(["one"], "demote")),
    ],
)
def test_changes_are_refused_by_name(reader, writer, operation, call):
    with pytest.raises(PermissionError, match="read-only") as caught:
        call(reader)
    assert isinstance(caught.value, AuthError)
    assert caught.value.operation == operation
    assert operation in str(caught.value)
    if operation != "remove_matching":
        assert caught.value.key
    assert writer.get("one") == b"1" * 5000
    assert not writer.exists("three")


@pytest.fixture
def stranger(cluster):
    """A credential that may read, used by somebody who speaks the protocol himself."""
    wires = ClusterWire(cluster.address, secret=read_only_secret(SECRET.encode()))
    yield wires.shard()
    wires.close()


def test_it_cannot_take_the_memory_under_the_view_of_another(writer, reader, stranger):
    """Invariants 1 and 4: what it may give back and prolong is its own."""
    writer.put("shown", b"A" * MIB)
    with reader.view("shown", ttl="60s") as view:
        attack(stranger, writer, "shown")
        with pytest.raises(HasLeaseError):
            writer.remove("shown")
        writer.remove("shown", force=True)
        for number in range(80):  # more than the pool holds
            writer.put(f"new {number}", b"B" * MIB)
        assert view.remaining_s > 0
        assert bytes(view.data) == b"A" * MIB
    writer.clear(force=True)


def test_what_it_prolongs_is_a_lease_of_its_own(writer, stranger):
    writer.put("shown", b"value")
    digests = writer.identity.digests(["shown"])
    generations = attack(stranger, writer, "shown")
    renewed = stranger.call(wire.RENEW, ttl_ms=60_000, digests=digests, generations=generations)
    assert renewed.statuses.tolist() == [0]
    with pytest.raises(HasLeaseError):
        writer.remove("shown")
    stranger.call(wire.RELEASE, digests=digests, generations=generations)
    writer.remove("shown")


def test_files_are_read_and_writing_them_is_a_permission_error(cluster, files, writer):
    fs = MooncakeFileSystem(cluster.url, secret_file=files["reader"], skip_instance_cache=True)
    assert fs.cat_file("one") == b"1" * 5000
    for change in (
        lambda: fs.pipe_file("new", b"x"),
        lambda: fs.rm("one"),
        lambda: fs.mv("one", "new"),
        lambda: fs.cp("one", "new"),
    ):
        with pytest.raises(PermissionError, match="read-only"):
            change()
    with pytest.raises(PermissionError, match="new"), fs.open("new", "wb") as file:
        file.write(b"x")
    assert writer.get("one") == b"1" * 5000
    fs.close()


def test_a_wrong_secret_is_refused(cluster, files):
    with pytest.raises(AuthError, match="secret"):
        Client(cluster.url, secret_file=files["other"]).exists("one")


def test_the_command_prints_it(files, capsys):
    assert main(["secret", "reader", files["full"]]) == 0
    assert capsys.readouterr().out.strip().encode() == read_secret(files["reader"])
