"""Clients, workers and mounts that are told an etcd instead of masters: processes, a real etcd."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import fsspec
import pytest

from mooncake_store.client.aio import AsyncClient
from mooncake_store.client.blocking import Client
from mooncake_store.compat.store import MooncakeDistributedStore
from mooncake_store.coordination.access import read_access
from mooncake_store.coordination.etcd import EtcdCoordinator
from mooncake_store.errors import AuthError, RemoteProtocolError, StoreError, UnavailableError
from mooncake_store.fs import MooncakeFileSystem
from tests.conftest import programs, remove_rings, shards_below
from tests.coordination.etcds import Etcd, Relay, certificate, free_ports
from tests.standby.members import Members, assert_there, put, value_of
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def start_for_module():
    yield from programs()


@pytest.fixture(scope="module")
def etcd(start_for_module, tmp_path_factory):
    return Etcd(start_for_module, tmp_path_factory.mktemp("etcd"))


@pytest.fixture(scope="module")
def pool(start_for_module, etcd, tmp_path_factory):
    """A pool of one member and a worker that was told the etcd; nobody breaks it."""
    folder = tmp_path_factory.mktemp("pool")
    made = Members(start_for_module, folder, etcd.addresses[0])
    made.start(0)
    made.lend(made.by_etcd)
    with Client(f"{made.by_etcd}/tests") as client:
        until(lambda: client.status().ready)
    yield made
    made.close()
    for shard in shards_below(folder):
        remove_rings(shard)


@pytest.fixture
def own_pool(start_program, etcd, tmp_path):
    """Make a pool of another name, which a test may break."""
    made = []

    def make(name, **options):
        made.append(Members(start_program, tmp_path, etcd.addresses[0], name=name, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def mooncake(*arguments, **environment):
    command = [sys.executable, "-m", "mooncake_store", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | environment
    )


def test_threads_and_event_loops_find_who_leads(pool):
    client = pool.client(pool.by_etcd)
    put(client, ["blocking"])
    assert client.master == f"127.0.0.1:{pool.ports[0]}"

    async def read():
        async with AsyncClient(f"{pool.by_etcd}/tests") as other:
            return bytes(await other.get("blocking")), other.master

    assert asyncio.run(read()) == (value_of("blocking"), client.master)


def test_commands_find_who_leads(pool, tmp_path):
    url = f"{pool.by_etcd}/tests"
    (tmp_path / "file").write_bytes(b"content")
    done = mooncake("put", "command", tmp_path / "file", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    done = mooncake("get", "command", MOONCAKE_URL=url)
    assert (done.returncode, done.stdout) == (0, "content")
    done = mooncake("status", "--url", url, "--json")
    assert json.loads(done.stdout)["master"] == f"127.0.0.1:{pool.ports[0]}"
    for named in (url, pool.masters):
        done = mooncake("shard", "list", "--url", named, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        assert [host["shards"] for host in json.loads(done.stdout)["hosts"]] == [[0]]


def test_a_filesystem_finds_who_leads(pool):
    fsspec.register_implementation("mooncake+etcd", MooncakeFileSystem, clobber=True)
    url = f"{pool.by_etcd}/files/folder/name"
    with fsspec.open(url, "wb") as file:
        file.write(b"content")
    fs, path = fsspec.url_to_fs(url)
    try:
        assert path == "folder/name"
        assert fs.cat(url) == b"content"
        assert fs.unstrip_protocol(path) == url
        assert fs.ls(f"{pool.by_etcd}/files/folder", detail=False) == ["folder/name"]
    finally:
        fs.close()


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="this machine has no /dev/fuse")
@pytest.mark.skipif(not shutil.which("fusermount3"), reason="fuse3 is not installed")
def test_a_mount_finds_who_leads(pool, tmp_path):
    pytest.importorskip("mfusepy", reason="the fuse extra is not installed")
    directory = tmp_path / "pool"
    directory.mkdir()
    done = mooncake("mount", f"{pool.by_etcd}/mounted", directory)
    assert done.returncode == 0, done.stderr
    try:
        (directory / "file").write_bytes(b"content")
        with Client(f"{pool.by_etcd}/mounted") as client:
            assert client.get("file") == b"content"
    finally:
        subprocess.run(["fusermount3", "-u", "-z", directory], check=False, timeout=30)


@pytest.mark.parametrize("named", ["etcd://{}", "etcd://{}/pool", "mooncake+etcd://{}/pool"])
def test_the_drop_in_finds_who_leads_and_lends_to_whoever_does(pool, etcd, monkeypatch, named):
    """The original's entry does not say what the pool is called: a variable does."""
    monkeypatch.setenv("MC_STORE_CLUSTER_ID", "pool")
    (nobody,) = free_ports(1)
    store = MooncakeDistributedStore()
    given = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
    sizes = {"global_segment_size": 4 << 20, "local_buffer_size": 1 << 20}
    entry = named.format(f"127.0.0.1:{nobody};{etcd.addresses[0]}")
    try:
        assert store.setup(given | sizes | {"master_server_addr": entry}) == 0
        assert store.put("drop-in", b"value") == 0
        assert store.get("drop-in") == b"value"
    finally:
        store.close()


def test_two_pools_of_one_etcd_are_two(pool, own_pool):
    other = own_pool("another")
    other.start(0)
    other.lend(other.by_etcd)
    clients = [each.client(each.by_etcd, segment=0) for each in (pool, other)]
    until(lambda: clients[1].status().ready)
    put(clients[0], ["one"])
    put(clients[1], ["other"])
    assert [client.exists("one") for client in clients] == [True, False]
    assert [client.exists("other") for client in clients] == [False, True]


def test_what_is_not_there_is_told_at_once_with_who_was_asked(pool, etcd):
    address, (nobody,) = etcd.addresses[0], free_ports(1)
    for url, kind, said in (
        (
            f"mooncake+etcd://{address}/pol/ns",
            UnavailableError,
            r"no pool was ever called 'pol' there: no key begins with mooncake/pol/ "
            rf"\(.*peer {address}.*check the name",
        ),
        (
            f"mooncake+etcd://127.0.0.1:{nobody}/pool/ns",
            UnavailableError,
            rf"cannot reach the etcd: .*refused \(.*peer 127.0.0.1:{nobody}",
        ),
        (
            f"mooncake+etcd://127.0.0.1:{pool.ports[0]}/pool/ns",
            RemoteProtocolError,
            rf"no answer of an etcd.*peer 127.0.0.1:{pool.ports[0]}.*a master listens there, which",
        ),
        (
            f"mooncake://{address}/pool",
            UnavailableError,
            rf"handshake failed.*peer {address}.*check that the address names a mooncake server",
        ),
    ):
        with pytest.raises(kind, match=said):
            Client(url)
        done = mooncake("ls", "--url", url)
        assert done.returncode == (4 if kind is UnavailableError else 1)
        assert done.stdout == ""
    # A worker waits for an etcd and for its members, but not for a master to become an etcd.
    url = f"mooncake+etcd://127.0.0.1:{pool.ports[0]}/pool"
    done = mooncake("worker", "--segment", "4MiB", "--url", url)
    assert done.returncode == 1
    assert "a master listens there" in done.stderr


def test_an_etcd_that_stands_still_is_waited_for_no_longer_than_was_said(start_program, tmp_path):
    etcd = Etcd(start_program, tmp_path)
    etcd.stop()
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"the etcd did not answer \(operation connect"):
        Client(f"mooncake+etcd://{etcd.addresses[0]}/pool", connect_timeout="0.5s", deadline="60s")
    assert 0.5 <= time.monotonic() - began < PATIENCE_S / 2
    etcd.go_on()


def test_members_may_be_replaced_by_others_at_other_addresses(own_pool):
    pool = own_pool("moving")
    assert pool.start(0)["leads"]
    pool.lend(pool.by_etcd)
    client = pool.client(pool.by_etcd)
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0)
    keys = [f"key-{n:03d}" for n in range(100)]
    put(client, keys)
    former = list(pool.ports)

    async def follow():
        async with AsyncClient(f"{pool.by_etcd}/tests", deadline="60s") as other:
            for leader in (1, 0):
                pool.lose(1 - leader)
                pool.leads(leader)
                async with asyncio.timeout(PATIENCE_S):
                    while not (await other.status()).ready:
                        pass
                assert [bytes(await other.get(key)) for key in keys] == [*map(value_of, keys)]
                # The one that was killed begins again elsewhere, and has its copy.
                pool.ports[1 - leader] = free_ports(1)[0]
                assert not pool.start(1 - leader)["leads"]
                pool.counts(leader)
            return other.master

    assert asyncio.run(follow()) == f"127.0.0.1:{pool.ports[0]}"
    assert not {*former} & {*pool.ports}
    # Neither the client, which asked nobody meanwhile, nor the worker knows one of these.
    assert_there(client, keys)
    put(client, ["after"])
    assert client.master == f"127.0.0.1:{pool.ports[0]}"


class Cut(threading.Thread):
    """A relay to the etcd, on a loop of its own, that can be cut."""

    def __init__(self, address):
        super().__init__()
        self._loop, self._relay = asyncio.new_event_loop(), Relay(address)

    def run(self):
        self._loop.run_forever()

    def __enter__(self):
        self.start()
        self._do(self._relay.open())
        return self._relay

    def __exit__(self, *_):
        self._do(self._relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()
        self._loop.close()

    def _do(self, work):
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


def test_a_client_that_knows_members_needs_no_etcd(own_pool, etcd):
    pool = own_pool("cut-off")
    pool.start(0)
    pool.lend()
    pool.start(1)
    pool.counts(0)
    with Cut(etcd.addresses[0]) as relay:
        url = f"mooncake+etcd://{relay.address}/cut-off"
        client = pool.client(url)
        until(lambda: client.status().ready)
        put(client, ["one"])
        relay.cut()
        with pytest.raises(UnavailableError, match=f"the etcd did not answer.*{relay.address}"):
            pool.client(url, connect_timeout="0.3s")
        assert_there(client, ["one"])
        pool.lose(0)
        pool.leads(1)
        until(lambda: client.status().ready)
        assert_there(client, ["one"])
        assert client.master == f"127.0.0.1:{pool.ports[1]}"


def test_a_name_under_which_nobody_leads_says_who_was_asked(own_pool, etcd):
    pool = own_pool("leaderless")
    pool.start(0)
    pool.lose(0)
    pool.programs[1] = pool.run(1)  # which lacks what the other one has, so it may not lead
    asked = f"127.0.0.1:{pool.ports[1]}: "

    def refusal():
        with pytest.raises(UnavailableError) as caught:
            Client(f"{pool.by_etcd}/tests")
        return str(caught.value)

    said = until(lambda: found if "nobody leads" in (found := refusal()) and asked in found else "")
    assert f"the etcd at {etcd.addresses[0]} says that nobody leads 'leaderless'" in said
    assert "there is no key mooncake/leaderless/leaders/leader" in said
    done = mooncake("promote", pool.by_etcd, "--check")
    assert done.returncode == 4
    assert "nobody leads 'leaderless': there is no key" in done.stdout
    assert asked in said
    assert " s); " in said or " s)" in said


class Guarded:
    """An etcd with TLS and users; files of what is shown to it."""

    def __init__(self, start_program, folder):
        cert, key = certificate(folder)
        tls = "--cert-file", cert, "--key-file", key
        self._folder = folder
        self._etcd = Etcd(start_program, folder / "etcd", 1, *tls, scheme="https")
        self.address = self._etcd.addresses[0]
        asyncio.run(self._prepare())

    def shown(self, user="", password="secret"):
        """A file that says so."""
        path = self._folder / f"{user}-{password}.toml"
        who = f'user = "{user}"\npassword = "{password}"\n' if user else ""
        path.write_text(f'ca = "etcd.crt"\n{who}')
        path.chmod(0o600)
        return str(path)

    def ask_as_root(self, path, request):
        """Change something of the users."""
        root = self._coordinator("root")
        asyncio.run(root._gateway.ask("prepare", f"auth/{path}", request))

    def _coordinator(self, user=""):
        access = read_access(self.shown(user))
        return EtcdCoordinator(self._etcd.addresses, "guarded", access=access)

    async def _prepare(self):
        anybody, (begin, end) = self._coordinator(), (b"mooncake/guarded/", b"mooncake/guarded0")
        for name, kind in (("root", "READWRITE"), ("member", "READWRITE"), ("reader", "READ")):
            span = {"permType": kind, "key": begin, "range_end": end}
            for path, request in (
                ("user/add", {"name": name, "password": "secret"}),
                ("role/add", {"name": name}),
                ("role/grant", {"name": name, "perm": span}),
                ("user/grant", {"user": name, "role": name}),
            ):
                await anybody._gateway.ask("prepare", f"auth/{path}", request)
        await anybody._gateway.ask("prepare", "auth/enable", {})


def test_members_workers_and_clients_show_an_etcd_who_they_are(start_program, tmp_path):
    etcd = Guarded(start_program, tmp_path)
    shown = etcd.shown("member")
    pool = Members(start_program, tmp_path, etcd.address, name="guarded", etcd_file=shown)
    with contextlib.closing(pool):
        assert pool.start(0)["leads"]
        pool.lend(pool.by_etcd)
        reader = etcd.shown("reader")
        client = pool.client(pool.by_etcd, etcd_file=reader)
        until(lambda: client.status().ready)
        put(client, ["one"])
        assert not pool.start(1)["leads"]
        pool.counts(0)
        url = f"{pool.by_etcd}/tests"
        done = mooncake("get", "one", tmp_path / "one", "--url", url, "--etcd-file", reader)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "one").read_bytes() == value_of("one")
        for file in (etcd.shown("reader", "wrong"), etcd.shown()):
            with pytest.raises(AuthError, match="check the user of the etcd"):
                pool.client(pool.by_etcd, etcd_file=file)
        with pytest.raises(StoreError):
            pool.client(pool.by_etcd)


def test_a_member_that_the_etcd_lets_not_stay_ends(start_program, tmp_path):
    etcd = Guarded(start_program, tmp_path)
    given = {"name": "guarded", "etcd_file": etcd.shown("reader")}
    reader = Members(start_program, tmp_path / "reader", etcd.address, **given)
    given["etcd_file"] = etcd.shown("member")
    pool = Members(start_program, tmp_path, etcd.address, **given)
    with contextlib.closing(reader), contextlib.closing(pool):
        pool.start(0)
        pool.start(1)
        reader.programs[0] = reader.run(0)  # which may not say where it is
        assert reader.programs[0].wait() == 1
        assert "permission denied" in reader.programs[0].output
        etcd.ask_as_root("user/changepw", {"name": "member", "password": "another"})
        for program in pool.programs:
            assert program.wait() == 1
            assert "check the user of the etcd" in program.output
