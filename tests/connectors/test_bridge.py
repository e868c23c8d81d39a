"""The bridge on a real store, heard by subscribers as routers are."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
import threading

import msgspec
import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.errors import ConfigError
from serving.connectors.bridge import Bridge, main
from serving.connectors.keys import KVScope
from serving.connectors.publisher import Publisher
from tests.waiting import until

zmq = pytest.importorskip("zmq")

WAIT_S = 60
POLL_MS = 100
_fresh = itertools.count(100)
SCOPE = KVScope(model="m", dtype="float32", layout="x")


def named(count, start=1):
    """Block hashes as an engine's, in hex, and as its events have them."""
    hashes = [f"{number:064x}" for number in range(start, start + count)]
    return hashes, [int(each[-16:], 16) for each in hashes]


class Router:
    """Subscribes, decodes, asks for what it missed, and keeps an index as a router does."""

    def __init__(self, endpoint, replay_endpoint=""):
        self.replay_endpoint = replay_endpoint
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(endpoint)
        self.blocks = set()
        self.numbers = []
        self.events = []

    def take(self, frames):
        _, number, payload = frames
        self.numbers.append(int.from_bytes(number, "big"))
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self.events.append(event["type"])
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            assert event["medium"] == "cpu"
            change = self.blocks.update if event["type"] == "BlockStored" else (
                self.blocks.difference_update
            )  # fmt: skip
            change(event["block_hashes"])

    def step(self):
        """Take the next batch, or ask for those that never came."""
        if self.socket.poll(POLL_MS):
            frames = self.socket.recv_multipart()
            following = len(self.numbers)
            if int.from_bytes(frames[1], "big") == following:
                self.take(frames)
                return
        for frames in replay(self.replay_endpoint, len(self.numbers)):
            self.take(frames)

    def until(self, blocks):
        wanted = set(blocks)

        def reached():
            self.step()
            return self.blocks == wanted

        until(reached, WAIT_S, f"{len(wanted)} blocks")
        assert self.numbers == list(range(len(self.numbers)))

    def close(self):
        self.socket.close()


def replay(endpoint, first):
    """What a publisher still has from a number on, up to the end mark."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    try:
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while True:
            assert socket.poll(WAIT_S * 1000)
            _, *frames = socket.recv_multipart()
            if frames[1] == (-1).to_bytes(8, "big", signed=True):
                return batches
            batches.append(frames)
    finally:
        socket.close()


class Running:
    """A bridge on an event loop of its own."""

    def __init__(self, url, scopes=(SCOPE.digest,), kept=1000, **options):
        self._url, self._scopes, self._kept, self._options = url, scopes, kept, options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _main(self):
        async def anew():
            await self.bridge.publish_anew()

        publisher = Publisher(
            "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv", publish_anew=anew,
            kept=self._kept,
        )  # fmt: skip
        self.endpoint, self.replay_endpoint = publisher.endpoint, publisher.replay_endpoint
        self.publisher = publisher
        self.bridge = Bridge(self._url, publisher, self._scopes, **self._options)
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        self._ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self.bridge.run()
        await publisher.close()

    def close(self):
        self.loop.call_soon_threadsafe(self.task.cancel)
        self._thread.join(60)


@pytest.fixture
def bridge():
    made = []

    def make(url, **options):
        running = Running(url, **options)
        made.append(running)
        router = Router(running.endpoint, running.replay_endpoint)
        made.append(router)
        return running, router

    yield make
    for each in reversed(made):
        each.close()


@pytest.fixture
def store():
    with LocalCluster(1, "32MiB", in_process=True) as cluster, Client(cluster.url) as client:
        client.url = cluster.url
        yield client


def put(client, scope, hashes):
    client.put_many(scope.keys(hashes), [b"kv" * 32] * len(hashes)).check()


def test_blocks_come_and_go(store, bridge):
    hashes, numbers = named(20)
    put(store, SCOPE, hashes[:8])
    store.put("a file", b"of another kind")
    _, router = bridge(store.url)
    router.until(numbers[:8])
    put(store, SCOPE, hashes[8:])
    router.until(numbers)
    store.remove_many(SCOPE.keys(hashes[2:5]), force=True)
    router.until(numbers[:2] + numbers[5:])
    store.clear(force=True)
    router.until([])
    put(store, SCOPE, hashes[:1])
    router.until(numbers[:1])


def test_eviction_is_told(store, bridge):
    hashes, numbers = named(3)
    _, router = bridge(store.url)
    put(store, SCOPE, hashes)
    router.until(numbers)
    for number in range(200):
        store.put(f"filler/{number}", bytes(1 << 20))
        if not store.exists_many(SCOPE.keys(hashes)).any():
            break
    router.until([])


def test_block_of_two_ranks_is_told_when_both_have_it(store, bridge):
    ranks = [KVScope(model="m", dtype="f", layout="x", tp_size=2, kv_heads=2, tp_rank=rank)
             for rank in range(2)]  # fmt: skip
    hashes, numbers = named(2)
    _, router = bridge(store.url, scopes=[ranks[0].digest])
    put(store, ranks[0], hashes)
    put(store, ranks[1], hashes[:1])
    router.until(numbers[:1])
    store.remove_many(ranks[0].keys(hashes), force=True)
    router.until([])


def test_who_comes_late_gets_what_was_missed(store, bridge):
    hashes, numbers = named(4)
    running, router = bridge(store.url)
    put(store, SCOPE, hashes)
    router.until(numbers)
    late = Router(running.endpoint)
    try:
        for frames in replay(running.replay_endpoint, 0):
            late.take(frames)
        assert late.blocks == set(numbers)
        assert late.numbers == list(range(len(late.numbers)))
        assert late.events[0] == "AllBlocksCleared"
    finally:
        late.close()


def test_who_missed_more_than_is_kept_is_told_all_anew(store, bridge):
    hashes, numbers = named(6)
    running, router = bridge(store.url, kept=2)
    for at in range(6):
        put(store, SCOPE, hashes[at : at + 1])
        router.until(numbers[: at + 1])
    late = Router(running.endpoint, running.replay_endpoint)
    try:
        # It cannot put what is kept together to the whole, and starts anew with what then comes.
        def started_anew():
            assert len(replay(running.replay_endpoint, 0)) == 2
            while late.socket.poll(POLL_MS):
                late.take(late.socket.recv_multipart())
            return "AllBlocksCleared" in late.events

        until(started_anew, WAIT_S)
        assert late.blocks == set(numbers)
    finally:
        late.close()


def test_gap_in_the_stores_events_ends_in_the_same_index(bridge):
    hashes, numbers = named(600)
    with (
        LocalCluster(1, "32MiB", in_process=True, master={"events_kept": 16}) as cluster,
        Client(cluster.url) as store,
    ):
        put(store, SCOPE, hashes[:10])
        running, router = bridge(cluster.url)
        router.until(numbers[:10])
        # More events at once than the store keeps.
        put(store, SCOPE, hashes[10:])
        router.until(numbers)
        assert running.bridge.snapshots > 1
        store.remove_many(SCOPE.keys(hashes[:300]), force=True)
        router.until(numbers[300:])


def test_store_that_restarts_is_told_of(bridge, free_port):
    hashes, numbers = named(4)
    url = f"mooncake://127.0.0.1:{free_port}/default"
    settings = {"master": {"port": free_port}, "in_process": True}
    with LocalCluster(1, "32MiB", **settings), Client(url) as store:
        put(store, SCOPE, hashes)
        _, router = bridge(url)
        router.until(numbers)
    router.until([])
    with LocalCluster(1, "32MiB", **settings), Client(url) as store:
        put(store, SCOPE, hashes[:2])
        router.until(numbers[:2])


def test_shards_are_followed_together(bridge):
    hashes, numbers = named(64)
    with LocalCluster(1, "32MiB", master={"shards": 2}) as cluster, Client(cluster.url) as store:
        put(store, SCOPE, hashes[:40])
        _, router = bridge(cluster.url)
        router.until(numbers[:40])
        put(store, SCOPE, hashes[40:])
        store.remove_many(SCOPE.keys(hashes[:20]), force=True)
        router.until(numbers[20:])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("vllm", 0x1122334455667788),
        ("sglang", 0xFFEEDDCCBBAA9988 - (1 << 64)),
        ("bytes", bytes.fromhex("ffeeddccbbaa9988" + "00" * 16 + "1122334455667788")),
    ],
)
def test_hashes_are_those_of_the_engines_own_events(store, bridge, form, expected):
    block = "ffeeddccbbaa9988" + "00" * 16 + "1122334455667788"
    put(store, SCOPE, [block])
    _, router = bridge(store.url, hashes=form)
    router.until([expected])


def test_our_own_index_follows_it(store, bridge):
    from serving.front.engine_events import read_batch
    from serving.front.indexer import Removed, Stored

    hashes, numbers = named(2)
    running, router = bridge(store.url)
    put(store, SCOPE, hashes)
    router.until(numbers)
    store.remove_many(SCOPE.keys(hashes[:1]), force=True)
    router.until(numbers[1:])
    events = [
        each for frames in replay(running.replay_endpoint, 0) for each in read_batch(frames)[1]
    ]
    assert {each for e in events if isinstance(e, Stored) for each in e.hashes} == set(numbers)
    assert [e.hashes for e in events if isinstance(e, Removed)] == [(numbers[0],)]


def test_removals_precede_what_came_back(store, bridge):
    # Whoever applies events in order must not drop a block that is there.
    running, router = bridge(store.url)
    told = asyncio.run_coroutine_threadsafe(
        running.bridge._tell(["01", "02"], ["01", "03"]), running.loop
    )
    told.result(30)
    router.until([1, 2])


def _heard(store, router):
    hashes, _ = named(1, start=next(_fresh))
    put(store, SCOPE, hashes)
    if router.socket.poll(POLL_MS):
        router.take(router.socket.recv_multipart())
    return router.blocks


def test_program_says_where_it_publishes_and_ends_on_a_signal(store):
    put(store, SCOPE, named(1)[0])
    program = subprocess.Popen(
        [
            sys.executable, "-m", "serving.connectors.bridge", "--url", store.url,
            "--endpoint", "tcp://127.0.0.1:*", "--replay", "tcp://127.0.0.1:*",
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = program.stdout.readline()
        assert SCOPE.digest in line
        router = Router(line.split()[-1])
        try:
            # Whoever subscribes hears what comes from then on.
            until(lambda: _heard(store, router), WAIT_S)
        finally:
            router.close()
        program.terminate()
        assert program.wait(30) == 0
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_wrong_arguments_are_said(store, capsys):
    assert main(["--url", store.url, "--endpoint", "tcp://127.0.0.1:*"]) == 3
    assert "--scope" in capsys.readouterr().err
    bad = ["--url", store.url, "--scope", SCOPE.digest, "--endpoint", "tcp://nowhere"]
    assert main(bad) == 3
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        Bridge(store.url, None, [])
