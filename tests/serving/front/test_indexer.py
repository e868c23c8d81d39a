"""The indexer: what engines tell of, found by tokens, over HTTP and over ZeroMQ."""

import asyncio
import errno

import msgspec
import pytest

from mooncake_store.errors import ConfigError, RemoteProtocolError
from serving.connectors.publisher import BlockStored, Publisher
from serving.front import engine_events, indexer
from serving.front.engine_events import read_batch
from serving.front.external import ExternalFront, external_application
from serving.front.indexer import Cleared, EngineIndex, Registration, Removed, ScopeKey, Stored
from serving.front.indexer_http import Indexer
from serving.front.openai import BadRequestError
from tests.serving.front.conftest import listening
from tests.serving.front.engines import ADMIN, SHELL
from tests.waiting import PATIENCE_S, until_async

TOKENS = tuple(range(100, 132))  # eight blocks of four
MODEL = "m"


def engine(index, name, **more):
    return index.register(Registration(name, MODEL, 4, **more))


def told(index, tokens=TOKENS):
    return index.query(ScopeKey(MODEL, 4), tokens)["default"]


def matches(index):
    key = ScopeKey(MODEL, 4)
    return index.matches(key, index.chain(key, TOKENS))


def test_a_prefix_is_found_by_its_tokens_whatever_engines_call_the_blocks():
    index = EngineIndex()
    engine(index, "a").apply(Stored((11, 12, 13), None, TOKENS[:12]))
    engine(index, "b").apply(Stored((b"x", b"y"), None, TOKENS[:8]))
    assert told(index)["a"]["longest_matched"] == 12
    assert told(index)["b"] == {
        "longest_matched": 8, "GPU": 8, "DP": {"0": 8}, "CPU": 8, "DISK": 8,
    }  # fmt: skip
    assert told(index, TOKENS[:11])["a"]["longest_matched"] == 8
    assert told(index, (1, *TOKENS))["a"]["longest_matched"] == 0
    assert matches(index) == {"a": 12, "b": 8}


def test_later_blocks_hang_on_earlier_ones():
    index = EngineIndex()
    source = engine(index, "a")
    source.apply(Stored((1, 2), None, TOKENS[:8]))
    source.apply(Stored((3,), 2, TOKENS[8:12]))
    source.apply(Stored((9,), 8, TOKENS[:4]))  # nobody told of its parent
    assert told(index)["a"]["GPU"] == 12
    assert source.dropped == 1
    source.apply(Removed((2,)))
    assert told(index)["a"]["GPU"] == 4
    source.apply(Stored((2,), 1, TOKENS[4:8]))
    assert told(index)["a"]["GPU"] == 12
    source.apply(Cleared())
    assert told(index)["a"]["longest_matched"] == 0


def test_what_nobody_has_any_more_is_forgotten_where_it_is_much(monkeypatch):
    monkeypatch.setattr(indexer, "NAMES_LEAST", 10)
    index = EngineIndex()
    source, other = engine(index, "a"), engine(index, "b")
    other.apply(Stored((b"kept",), None, TOKENS[:4]))
    for number in range(100):
        source.apply(Stored((number,), None, (number,) * 4))
        source.apply(Removed((number,)))
    source.apply(Stored((100, 101), None, TOKENS[:8]))
    (scope,) = {each._scope.identity: each._scope for each in index.sources.values()}.values()
    assert len(scope.names) <= 13
    assert told(index)["a"]["GPU"] == 8
    other.apply(Stored((b"next",), b"kept", TOKENS[4:8]))
    assert told(index)["b"]["GPU"] == 8


def test_an_engine_tells_of_so_many_blocks_and_no_more(monkeypatch):
    monkeypatch.setattr(indexer, "BLOCKS_OF_SOURCE_MAX", 3)
    index = EngineIndex()
    source = engine(index, "a")
    source.apply(Stored((1, 2, 3, 4, 5), None, TOKENS[:20]))
    assert (source.blocks, source.dropped) == (3, 2)
    source.apply(Stored((3,), 2, TOKENS[8:12], "cpu"))  # is known
    source.apply(Removed((2,)))
    source.apply(Stored((2, 5), 1, TOKENS[4:8]))
    assert (source.blocks, source.dropped) == (3, 3)
    assert told(index)["a"]["GPU"] == 12


def test_tiers_count_the_faster_ones_in():
    index = EngineIndex()
    source = engine(index, "a")
    source.apply(Stored((1, 2), None, TOKENS[:8], "GPU"))
    source.apply(Stored((3,), 2, TOKENS[8:12], "cpu"))
    source.apply(Stored((4,), 3, TOKENS[12:16], "disk"))
    found = told(index)["a"]
    assert (found["GPU"], found["CPU"], found["DISK"], found["longest_matched"]) == (8, 12, 16, 16)
    source.apply(Stored((2,), 1, TOKENS[4:8], "CPU"))
    source.apply(Removed((2,), "GPU"))
    found = told(index)["a"]
    assert (found["GPU"], found["CPU"], found["DISK"]) == (4, 12, 16)


def test_a_shared_pool_counts_for_every_engine_of_the_scope():
    index = EngineIndex()
    engine(index, "a").apply(Stored((1, 2, 3), None, TOKENS[:12]))
    engine(index, "b")
    engine(index, "pool", kind="Mooncake").apply(Stored((1, 2), None, (), "cpu"))
    assert told(index)["b"] == {
        "longest_matched": 8, "GPU": 0, "DP": {"0": 0}, "CPU": 8, "DISK": 8,
    }  # fmt: skip
    assert "pool" not in told(index)


def test_ranks_tenants_adapters_and_salts_are_kept_apart():
    index = EngineIndex()
    engine(index, "a", dp_rank=0).apply(Stored((1,), None, TOKENS[:4]))
    engine(index, "a", dp_rank=1).apply(Stored((1, 2), None, TOKENS[:8]))
    engine(index, "a", tenant="t").apply(Stored((1, 2, 3), None, TOKENS[:12]))
    engine(index, "a", lora="l").apply(Stored((1,), None, TOKENS[:4]))
    assert told(index)["a"]["DP"] == {"0": 4, "1": 8}
    assert index.query(ScopeKey(MODEL, 4, lora="l"), TOKENS)["default"]["a"]["GPU"] == 4
    assert index.query(ScopeKey(MODEL, 4, tenant="t"), TOKENS)["t"]["a"]["GPU"] == 12
    assert index.query(ScopeKey(MODEL, 4, salt="s"), TOKENS) == {"default": {}}
    assert index.unregister("a|default|1")
    assert not index.unregister("a|default|1")


def test_blocks_of_an_adapter_an_image_or_a_salt_are_not_those_of_the_same_tokens():
    index = EngineIndex()
    plain, adapted = engine(index, "a"), engine(index, "a", lora="l")
    event = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
        "token_ids": list(TOKENS[:4]), "block_size": 4, "medium": "GPU", "lora_name": None,
    }  # fmt: skip

    def tell(**more):
        _, events = read_batch([b"", bytes(8), batch(event | more)])
        for source in plain, adapted:
            for each in events:
                source.apply(each)
        return plain.blocks, adapted.blocks

    assert tell(extra_keys=[["of a tenant"]]) == (0, 0)
    assert tell(extra_keys=[[["an image", 3]]]) == (0, 0)
    assert tell(lora_name="l", extra_keys=[["l"]]) == (0, 1)
    assert tell(lora_name="other", extra_keys=[["other"]]) == (0, 1)
    assert tell(extra_keys=[None]) == (1, 1)


def batch(*events):
    return msgspec.msgpack.encode([0.0, list(events), 0])


def test_batches_of_every_publisher_are_read():
    vllm = batch(
        ["BlockStored", [1, 2], None, list(TOKENS[:8]), 4, None, "GPU", "lora", "new field"],
        ["BlockRemoved", [1], "CPU"],
        ["AllBlocksCleared"],
        ["SomethingNew", 1],
        ["BlockStored"],
    )
    number, events = read_batch([b"topic", (7).to_bytes(8, "big"), vllm])
    assert number == 7
    assert events == [
        Stored((1, 2), None, TOKENS[:8], "GPU", "lora"), Removed((1,), "CPU"), Cleared(),
    ]  # fmt: skip
    ours = batch(
        {"event_type": "stored", "seq_hashes": [5], "medium": "cpu", "token_ids": None},
        {"type": "BlockRemoved", "block_hashes": [6], "medium": "disk"},
    )
    _, events = read_batch([b"", bytes(8), ours])
    assert events == [Stored((5,), None, (), "cpu"), Removed((6,), "disk")]


@pytest.mark.parametrize(
    "frames",
    [[], [b"x"], [b"", b"short", b"\x90"], [b"", bytes(8), b"\xc1"], [b"", bytes(8), b"\x01"]],
)
def test_what_is_no_batch_is_refused(frames):
    with pytest.raises(RemoteProtocolError):
        read_batch(frames)


def registration(name, **more):
    return {"instance_id": name, "modelname": MODEL, "block_size": 4, "type": "vLLM"} | more


@pytest.mark.asyncio
async def test_register_query_and_unregister_over_http(http):
    front = ExternalFront({})
    indexer = front.indexer
    async with listening(external_application(front, SHELL)) as url:

        async def post(path, body):
            async with http.post(url + path, json=body, headers=ADMIN) as response:
                return response.status, await response.json()

        for name in ("a", "b"):
            assert (await post("/register", registration(name)))[0] == 200
        indexer.index.sources["a|default|0"].apply(Stored((21, 22), None, TOKENS[:8]))
        query = {"model": MODEL, "block_size": 4, "token_ids": list(TOKENS)}
        _, found = await post("/query", query)
        assert found["default"]["a"]["longest_matched"] == 8
        assert found["default"]["b"]["longest_matched"] == 0
        _, found = await post("/query", query | {"instance_id": "a"})
        assert list(found["default"]) == ["a"]
        hashes = {"model": MODEL, "block_size": 4, "seq_hashes": [21, 22, 23]}
        _, found = await post("/query_by_hash", hashes)
        assert found["default"]["a"]["longest_matched"] == 8
        async with http.get(url + "/services") as response:
            listed = (await response.json())["services"]
        assert [each["instance_id"] for each in listed] == ["a", "b"]
        async with http.get(url + "/global_view") as response:
            assert (await response.json())["a|default|0"] == {"blocks": 2, "dropped": 0}
        _, found = await post("/unregister", {"instance_id": "a"})
        assert found == {"removed_instances": ["a|default|0"]}
        for path, body, param in (
            ("/register", {"instance_id": "x"}, "modelname"),
            ("/register", registration("x", block_size=0), "block_size"),
            ("/register", registration("x", dp_rank=-1), "dp_rank"),
            ("/register", registration("x", endpoint=7), "endpoint"),
            ("/register", registration("x|y"), None),
            ("/register", registration("x" * 1025), "instance_id"),
            ("/register", registration("x", lora_name="y" * 1025), "lora_name"),
            ("/register", registration("x", endpoint="tcp://" + "y" * 1025), "endpoint"),
            ("/register", [], None),
            ("/unregister", {"instance_id": ""}, "instance_id"),
            ("/query", {"model": MODEL, "block_size": 4}, "token_ids"),
            ("/query", {"model": MODEL, "block_size": 4, "token_ids": "no"}, "token_ids"),
            ("/query", {"model": MODEL, "block_size": 4, "token_ids": [1 << 90] * 4}, "token_ids"),
            (
                "/query_by_hash",
                {"model": MODEL, "block_size": 4, "seq_hashes": [None]},
                "seq_hashes",
            ),
        ):
            status, answered = await post(path, body)
            assert status == 400
            assert answered["error"]["param"] == param
            assert param is None or param in answered["error"]["message"]
        null = dict.fromkeys(("endpoint", "type", "tenant_id", "lora_name", "additionalsalt"))
        _, found = await post("/register", registration("c", **null))
        assert found["instance"] == "c|default|0"


@pytest.mark.asyncio
async def test_of_registrations_that_come_together_one_is_followed(monkeypatch):
    followed = []

    class Followed:
        def __init__(self, source):
            followed.append(self)

        async def close(self):
            await asyncio.sleep(0)
            followed.remove(self)

    monkeypatch.setattr("serving.front.indexer_http.Subscription", Followed)
    indexer = Indexer()
    entry = Registration("a", MODEL, 4, endpoint="tcp://127.0.0.1:1")
    await asyncio.gather(*(indexer.register(entry) for _ in range(5)))
    assert len(followed) == 1
    assert await indexer.unregister([entry.name]) == [entry.name]
    assert not followed


def stored(number):
    """The event of one block more."""
    return BlockStored(
        block_hashes=[number + 1],
        parent_block_hash=number or None,
        token_ids=list(TOKENS[4 * number : 4 * number + 4]),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("replay", [True, False])
async def test_events_over_zeromq_and_a_gap(replay):
    pytest.importorskip("zmq")
    anywhere = "tcp://127.0.0.1:*"
    publisher, indexer = Publisher(anywhere, anywhere), Indexer()
    try:
        for number in range(4):  # nobody listens yet
            await publisher.publish([stored(number)])
        replay_at = publisher.replay_endpoint if replay else ""
        await indexer.register(
            Registration("a", MODEL, 4, endpoint=publisher.endpoint, replay_endpoint=replay_at)
        )
        source = indexer.index.sources["a|default|0"]

        async def heard():
            """Publish until the subscriber is there; nothing announces that it is."""
            while not (source.blocks or source.dropped):
                await publisher.publish([stored(4)])
                await asyncio.sleep(0)

        await asyncio.wait_for(heard(), 20)
        # Without a replay the blocks before the gap are unknown, and so is what hangs on them.
        found = 20 if replay else 0
        await until_async(lambda: matches(indexer.index)["a"] == found)
        assert bool(source.dropped) != replay
    finally:
        await indexer.close()
        await publisher.close()


def of_its_own(name, first):
    """The event of a block that begins another prompt."""
    tokens = [first] * 4
    return BlockStored([name], None, tokens, 4, None, "GPU", None)


@pytest.mark.asyncio
@pytest.mark.parametrize("replay", [True, False])
async def test_of_a_publisher_that_was_started_anew_nothing_is_kept(replay):
    pytest.importorskip("zmq")
    anywhere = "tcp://127.0.0.1:*"
    publisher, indexer = Publisher(anywhere, anywhere), Indexer()
    endpoint, replay_at = publisher.endpoint, publisher.replay_endpoint
    try:
        await indexer.register(
            Registration(
                "a", MODEL, 4, endpoint=endpoint, replay_endpoint=replay_at if replay else ""
            )
        )
        source = indexer.index.sources["a|default|0"]
        published = 0
        while matches(indexer.index)["a"] != 4:
            await publisher.publish([stored(0)])
            published += 1
            await asyncio.sleep(0)
        await publisher.close()
        publisher = Publisher(endpoint, replay_at)
        # Nobody may hear these yet, and the next number is what the former one's would have been.
        await publisher.publish([of_its_own(50, 7)])
        for _ in range(published - 1):
            await publisher.publish([])
        while not told(indexer.index, [8] * 4)["a"]["GPU"]:
            await publisher.publish([of_its_own(60, 8)])
            await asyncio.sleep(0)
        assert matches(indexer.index)["a"] == 0
        assert not replay or source.blocks == 2  # what it said before it was heard, too
    finally:
        await indexer.close()
        await publisher.close()


@pytest.mark.asyncio
async def test_an_event_that_cannot_be_taken_in_does_not_end_the_others():
    pytest.importorskip("zmq")
    publisher, indexer = Publisher("tcp://127.0.0.1:*"), Indexer()
    try:
        await indexer.register(Registration("a", MODEL, 4, endpoint=publisher.endpoint))
        source = indexer.index.sources["a|default|0"]
        takes, failures = source.apply, [ValueError("injected")]

        def apply(event):
            if failures:
                raise failures.pop()
            takes(event)

        source.apply = apply

        async def heard():
            while not source.blocks:
                await publisher.publish([stored(0)])
                await asyncio.sleep(0)

        await asyncio.wait_for(heard(), PATIENCE_S)
        assert not failures
    finally:
        await indexer.close()
        await publisher.close()


@pytest.mark.asyncio
async def test_missed_events_are_told_after_one_telling_failed():
    zmq = pytest.importorskip("zmq")
    failures = [ValueError("injected")]

    async def anew():
        if failures:
            raise failures.pop()

    anywhere = "tcp://127.0.0.1:*"
    publisher = Publisher(anywhere, anywhere, publish_anew=anew, kept=1)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.DEALER)
    router.connect(publisher.replay_endpoint)
    try:
        for number in range(3):
            await publisher.publish([stored(number)])
        for _ in range(2):
            await router.send_multipart([b"", bytes(8)])
            for _ in range(2):  # what is kept, and the end mark
                await asyncio.wait_for(router.recv_multipart(), PATIENCE_S)
        assert not failures
    finally:
        context.destroy(linger=0)
        await publisher.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "endpoint", ["nonsense", "tcp://", "tcp://a:b", "pigeon://x:1", "tcp://\0:1"]
)
@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
async def test_an_endpoint_that_is_none_is_refused_and_ends_nothing(endpoint, field):
    pytest.importorskip("zmq")
    indexer = Indexer()
    good = "tcp://127.0.0.1:1"
    fields = {"endpoint": good, "replay_endpoint": good} | {field: endpoint}
    with pytest.raises(BadRequestError, match="no endpoint") as caught:
        await indexer.register(Registration("a", MODEL, 4, **fields))
    assert caught.value.status == 400
    assert not indexer.index.sources
    await indexer.register(Registration("a", MODEL, 4, endpoint=good))
    await indexer.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://a:b", "tcp://\0:1", "tcp://\ud800:1"])
def test_where_nothing_can_be_published_is_said(endpoint):
    pytest.importorskip("zmq")
    with pytest.raises(ConfigError, match="cannot publish KV events at"):
        Publisher(endpoint)


def test_a_batch_that_is_nested_without_end_is_no_batch():
    with pytest.raises(RemoteProtocolError, match="MessagePack"):
        read_batch([b"", bytes(8), b"\x91" * 100_000])


async def publish_until(publisher, event, seen):
    """Publish until it was heard; nothing announces that a subscriber is there."""

    async def publish():
        while not seen():
            await publisher.publish([event])
            await asyncio.sleep(0)

    await asyncio.wait_for(publish(), PATIENCE_S)


@pytest.mark.asyncio
async def test_a_batch_that_is_too_long_is_not_taken_in_and_ends_nothing(monkeypatch):
    pytest.importorskip("zmq")
    monkeypatch.setattr(engine_events, "BATCH_BYTES_MAX", 4096)
    publisher, indexer = Publisher("tcp://127.0.0.1:*"), Indexer()
    try:
        await indexer.register(Registration("a", MODEL, 4, endpoint=publisher.endpoint))
        source = indexer.index.sources["a|default|0"]
        await publish_until(publisher, of_its_own(50, 7), lambda: source.blocks)
        long = BlockStored([60], None, [8] * 100_000, 100_000, None, "GPU", None)
        await publish_until(publisher, long, lambda: not source.blocks)  # nothing is believed now
        await publish_until(publisher, of_its_own(70, 9), lambda: source.blocks)
        assert told(indexer.index, [9] * 4)["a"]["GPU"] == 4
    finally:
        await indexer.close()
        await publisher.close()


@pytest.fixture
def without_sockets(monkeypatch):
    """Let that many sockets be asked for in vain."""
    zmq = pytest.importorskip("zmq")
    make, left = zmq.asyncio.Context.socket, [0]

    def socket(context, *given, **more):
        if left[0]:
            left[0] -= 1
            raise zmq.ZMQError(errno.EMFILE)
        return make(context, *given, **more)

    monkeypatch.setattr(zmq.asyncio.Context, "socket", socket)
    return left


@pytest.mark.asyncio
async def test_a_want_of_sockets_is_said_and_ends_nothing(without_sockets):
    without_sockets[0] = 2
    anywhere = "tcp://127.0.0.1:*"
    with pytest.raises(ConfigError, match="Too many open files"):
        Publisher(anywhere)
    publisher, indexer = None, Indexer()
    try:
        there = Registration("a", MODEL, 4, endpoint="tcp://127.0.0.1:1")
        with pytest.raises(BadRequestError, match=r"no socket .*Too many open files"):
            await indexer.register(there)
        assert not indexer.index.sources
        publisher = Publisher(anywhere)
        await indexer.register(Registration("a", MODEL, 4, endpoint=publisher.endpoint))
        source = indexer.index.sources["a|default|0"]
        await publish_until(publisher, of_its_own(50, 7), lambda: source.blocks)
        without_sockets[0] = 1  # for who connects anew
        endpoint = publisher.endpoint
        await publisher.close()
        await until_async(lambda: not without_sockets[0])
        publisher = Publisher(endpoint)
        await publish_until(publisher, of_its_own(60, 8), lambda: source.blocks)
    finally:
        await indexer.close()
        if publisher is not None:
            await publisher.close()
