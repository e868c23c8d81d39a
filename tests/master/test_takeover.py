"""Another master at another address: who goes on there, whatever becomes of the first address.

Real programs. The second master has the state directory of the first, which was killed; what is
left at the address of that one refuses, swallows packets, or accepts and never answers.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading

import numpy as np
import pytest

from mooncake_store import AsyncClient, Client, UnavailableError, config
from mooncake_store.client import patience
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.wire.cluster import MAP, MapRequest
from mooncake_store.worker.master_link import CALL_S, MasterLink
from mooncake_store.worker.worker import Worker
from tests.client.test_follow import Mirror, digests_of
from tests.master.test_programs import MASTER, ready
from tests.waiting import PATIENCE_S, until

KEYS = [f"key/{number}" for number in range(20)]
DEADLINE = f"{PATIENCE_S}s"
LISTENER = """
import signal, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
signal.pause()
"""


def value_of(key):
    return np.random.default_rng(list(key.encode())).bytes(50_000)


def ports(count):
    """So many ports of the loopback that nobody used a moment ago."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Pool:
    """Masters at one of two addresses, and a worker with a name that is told both."""

    def __init__(self, start_program, folder, shards=1):
        self.start_program, self.shards = start_program, shards
        self.state, self.memory = folder / "state", folder / "memory"
        self.memory.mkdir()
        self.ports = ports(2)
        self.addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self.named = ",".join(self.addresses)
        self.url = f"mooncake://{self.named}/default"
        self.master = self.worker = None

    def start_master(self, at, state=None):
        self.master = self.start_program(
            *MASTER, "--port", self.ports[at], "--state", state or self.state, "--json",
            "--ping-interval", "200ms", "--client-ttl", "600s", "--shards", self.shards,
        )  # fmt: skip
        ready(self.master)
        return self.master

    def start_worker(self):
        self.worker = self.start_program(
            "-m", "mooncake_store", "worker", "--master", self.named, "--segment", "16MiB",
            "--name", "w", "--memory", self.memory, "--json",
        )  # fmt: skip
        ready(self.worker)

    def kill_master(self):
        self.master.kill()

    def told(self, *words):
        """What a command says of the pool, as a program reads it."""
        command = self.start_program("-m", "mooncake_store", *words, "--url", self.url, "--json")
        assert command.wait() == 0
        return json.loads(command.output)


@pytest.fixture
def pool(tmp_path, start_program):  # in this order: its folder is there to the end
    pool = Pool(start_program, tmp_path)
    pool.start_master(0)
    pool.start_worker()
    return pool


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However long another master takes to start."""
    monkeypatch.setattr(patience, "TAKEOVER_S", float(PATIENCE_S))


@contextlib.contextmanager
def closed(pool):
    yield


@contextlib.contextmanager
def swallowing(pool):
    """Drop what comes to the first address, as if its host was gone."""
    place = "127.0.0.1", pool.ports[0]
    with (
        socket.create_server(place, backlog=0),
        socket.create_connection(place, PATIENCE_S),  # which fills it
    ):
        with pytest.raises(TimeoutError):
            socket.create_connection(place, 0.1)
        yield


@contextlib.contextmanager
def stopped(pool):
    """Have a process that stands still at the first address: its connections are accepted."""
    listener = pool.start_program("-c", LISTENER, pool.ports[0])
    listener.wait_for_line("listening")
    listener.signal(signal.SIGSTOP)
    yield


LEFT = pytest.mark.parametrize("left", [closed, swallowing, stopped])


@LEFT
def test_all_go_on_with_a_master_at_another_address(pool, left):
    with (
        Client(pool.url, deadline=DEADLINE) as store,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        store.put_many(KEYS, [value_of(key) for key in KEYS]).check()
        follower = Mirror(store.follow(wait="50ms", deadline=DEADLINE))
        assert follower.settle() == digests_of(store, KEYS)
        pool.kill_master()
        with left(pool):
            meanwhile = threads.submit(store.exists, KEYS[0])
            pool.start_master(1)
            assert store.get(KEYS[0]) == value_of(KEYS[0])
            assert meanwhile.result(PATIENCE_S)
            assert store.master == pool.addresses[1]
            assert [store.get(key) == value_of(key) for key in KEYS] == [True] * len(KEYS)
            pool.worker.wait_for_line(f"mounted (at {pool.addresses[1]})")
            store.put("new", b"new")
            store.remove(KEYS[0], force=True)
            held = digests_of(store, ["new", *KEYS[1:]])
            until(lambda: follower.take() and follower.held == held)
            with Client(pool.url) as other:  # which was told the same
                assert other.get("new") == b"new"
                assert other.master == pool.addresses[1]
            status = pool.told("status")
            assert (status["ready"], status["master"]) == (True, pool.addresses[1])
            assert pool.told("top", "--interval", "0.1")["master"] == pool.addresses[1]
        # The memory is the one that was lent before, and the worker the same process.
        assert "replaced" not in pool.worker.output
        assert pool.worker.process.poll() is None


@LEFT
@pytest.mark.asyncio
async def test_so_does_a_client_of_asyncio(pool, left):
    async with AsyncClient(pool.url, deadline=DEADLINE) as store:
        await store.put_many(KEYS, [value_of(key) for key in KEYS])
        await asyncio.to_thread(pool.kill_master)
        with left(pool):
            meanwhile = asyncio.gather(*(store.get(key) for key in KEYS))
            await asyncio.to_thread(pool.start_master, 1)
            assert await store.exists(KEYS[0])
            assert await meanwhile == [value_of(key) for key in KEYS]
            assert store.master == pool.addresses[1]
            await asyncio.to_thread(pool.worker.wait_for_line, f"mounted (at {pool.addresses[1]})")
            assert (await store.put("new", b"new")).stored
            assert await store.get("new") == b"new"


@pytest.mark.skipif(
    not os.path.exists("/dev/fuse") or not shutil.which("fusermount3"),
    reason="this machine has no /dev/fuse, or no fuse3",
)
def test_a_mount_goes_on_as_well(pool, tmp_path):
    pytest.importorskip("mfusepy", reason="the fuse extra is not installed")
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = pool.start_program(
        "-m", "mooncake_store", "mount", pool.url, folder, "--foreground",
        MOONCAKE_DEADLINE=DEADLINE,
    )  # fmt: skip
    try:
        until(lambda: os.path.ismount(folder) or mount.process.poll() is not None)
        (folder / "before").write_bytes(value_of("before"))
        pool.kill_master()
        with swallowing(pool):
            pool.start_master(1)
            assert (folder / "before").read_bytes() == value_of("before")
            (folder / "after").write_bytes(value_of("after"))
            assert (folder / "after").read_bytes() == value_of("after")
    finally:
        subprocess.run(["fusermount3", "-u", "-z", folder], check=False, timeout=30)


@pytest.fixture(params=[1, 2])
def pool_of_two_lines(tmp_path, start_program, request):
    """A pool with a copy of its state, from which another master can lead at any time."""
    pool = Pool(start_program, tmp_path, request.param)
    pool.start_master(0)
    pool.start_worker()
    pool.master.signal(signal.SIGTERM)
    pool.master.wait()
    pool.copy = pool.state.with_name("copy")
    shutil.copytree(pool.state, pool.copy)
    pool.start_master(0)
    with Client(pool.url, deadline=DEADLINE) as store:
        store.put_many(KEYS, [b"old"] * len(KEYS)).check()  # once the worker has mounted
    return pool


def stop_and_lead(pool):
    """Let the leader, and whatever it began, stand still, and another one lead."""
    os.killpg(pool.master.process.pid, signal.SIGSTOP)
    pool.start_master(1, pool.copy)


def test_requests_to_a_leader_that_stands_still_go_to_the_next_one(pool_of_two_lines):
    """On connections that were open, and that nobody closes."""
    pool = pool_of_two_lines
    with Client(pool.url, deadline=DEADLINE, connect_timeout="1s", lease_cache=False) as store:
        followers = [
            Mirror(store.follow(shard, wait="50ms", deadline=DEADLINE))
            for shard in range(pool.shards)
        ]
        held = [follower.settle() for follower in followers]
        assert set.union(*held) == digests_of(store, KEYS)
        stop_and_lead(pool)
        assert not any(store.exists_many(KEYS))
        assert store.master == pool.addresses[1]
        pool.worker.wait_for_line(f"mounted (at {pool.addresses[1]})")
        assert store.put("new", b"new").stored
        until(
            lambda: (
                [follower.take() for follower in followers]
                and set.union(*(follower.held for follower in followers))
                == digests_of(store, ["new"])
            )
        )


@pytest.mark.asyncio
async def test_so_do_those_of_an_asyncio_client(pool_of_two_lines):
    pool = pool_of_two_lines
    async with AsyncClient(
        pool.url, deadline=DEADLINE, connect_timeout="1s", lease_cache=False
    ) as store:
        assert all(await store.exists_many(KEYS))
        await asyncio.to_thread(stop_and_lead, pool)
        assert not any(await asyncio.gather(*map(store.exists, KEYS)))
        assert store.master == pool.addresses[1]


@pytest.fixture
def two_masters(tmp_path):
    """Two masters of one cluster that both answer."""

    def run(state):
        given = {"port": 0, "state": str(state), "ping_interval": "50ms", "client_ttl": "600s"}
        return LocalCluster(workers=0, in_process=True, master=given)

    with run(tmp_path / "first"):
        pass
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with run(tmp_path / "first") as first, run(tmp_path / "second") as second:
        yield first, second


@pytest.fixture
def worker(two_masters):
    """A worker that knows both, and has mounted at the first."""
    overrides = {
        "master": ",".join(master.address for master in two_masters), "segments": "16MiB",
        "memory": "anonymous",
    }  # fmt: skip
    with Worker(config.load(config.WorkerConfig, environ={}, overrides=overrides).value) as made:
        assert str(made._link.masters.leader) == two_masters[0].address
        yield made


def mount_at(worker, master, wire):
    """Let it find another master, and wait until it is alive to that."""
    worker._link.masters._order.reverse()
    worker._ask_to_mount()
    until(lambda: worker._pulse is not None and worker._pulse.peer == wire.map().liveness)
    assert str(worker._link.masters.leader) == master.address
    until(lambda: set(wire.worker_states().values()) == {"alive"})


def test_a_worker_is_alive_to_the_master_it_mounted_at_last(worker, two_masters, wire_to):
    """Also while the one before, which leads no more, would still listen to it."""
    mount_at(worker, two_masters[1], wire_to(two_masters[1]))


def test_a_worker_whose_copies_wait_for_a_lost_shard_mounts_elsewhere(worker, two_masters, wire_to):
    waiting, held = threading.Event(), threading.Event()

    def work(cluster, numbers):
        waiting.set()
        assert held.wait(4 * PATIENCE_S)

    worker._copier.work = work
    try:
        assert waiting.wait(PATIENCE_S)
        mount_at(worker, two_masters[1], wire_to(two_masters[1]))
    finally:
        held.set()


def test_what_copied_until_another_mount_opens_no_connection_later(worker):
    copier = worker._copier
    copier.close()
    with pytest.raises(UnavailableError, match="by others now"):
        copier.work(worker._map, worker.numbers)
    assert all(connection.closed for connection in copier._connections.values())


def test_a_worker_searches_shortly_at_first(worker):
    """Another master may begin to lead while a silent one is waited for."""
    asked, call = [], worker._link.call

    def unreachable(operation, request, timeout_s=CALL_S, **options):
        if operation is MAP:
            asked.append(timeout_s)
            raise UnavailableError("nothing answered")
        return call(operation, request, timeout_s=timeout_s, **options)

    worker._link.call = unreachable
    while asked[-1:] != [CALL_S]:
        with pytest.raises(UnavailableError):
            worker._mount()
    assert asked[0] < CALL_S / 2
    assert asked == sorted(asked)
    worker._link.call = call
    worker._mount()
    assert worker._search_s == asked[0]


def test_the_master_of_another_pool_is_not_taken_for_the_one_that_leads(
    pool, tmp_path, monkeypatch
):
    monkeypatch.setattr(patience, "TAKEOVER_S", 1.0)
    with Client(pool.url, deadline=DEADLINE) as store:
        store.put("key", b"value")
        pool.kill_master()
        pool.start_master(1, tmp_path / "other")
        with pytest.raises(UnavailableError) as refused:
            store.exists("key")
        for address, said in zip(
            pool.addresses, ("nothing listens there", "this is a master of cluster"), strict=True
        ):
            assert f"{address}: {said}" in str(refused.value)
        pool.kill_master()
        pool.start_master(0)
        assert store.get("key") == b"value"
        assert store.master == pool.addresses[0]


def test_nor_by_a_worker(start_cluster):
    first, second = start_cluster(workers=0), start_cluster(workers=0)
    leader, other = first.address, second.address
    link = MasterLink(f"{leader},{other}", None)
    try:
        assert link.call(MAP, MapRequest()).shards
        assert str(link.masters.leader) == leader
        first.close()
        with pytest.raises(UnavailableError) as refused:
            link.call(MAP, MapRequest())
        assert f"{other}: this is a master of cluster" in str(refused.value)
        assert str(link.masters.leader) == leader
    finally:
        link.close()


def test_who_reaches_none_hears_of_all(pool):
    pool.kill_master()
    with swallowing(pool), pytest.raises(UnavailableError) as refused:
        Client(pool.url, connect_timeout="1s")
    first, second = pool.addresses
    assert f"none of 2 masters answers: {first}: nothing answered in time" in str(refused.value)
    assert f"; {second}: nothing listens there" in str(refused.value)
