"""vLLM itself on the CPU, with its KV blocks in a store: our connector, and vLLM's own.

Every answer is compared token by token with that of an engine without a store: counters of hits
alone would not show wrong bytes, nor a request that ended without output.
"""

import time

import pytest

from mooncake_store import Client
from tests.vllm.conftest import PROMPTS, ours
from tests.waiting import until

BLOCK = 32


def _engine(start, model, connector):
    settings = {key: value for key, value in connector.items() if key != "name"}
    return start(model, **settings)


def _whole_blocks(prompt):
    return (len(prompt) - 1) // BLOCK * BLOCK


def _counts(engine):
    """Counters of our connector, without their prefix."""
    prefix = "vllm:mooncake_py_"
    return {
        name.removeprefix(prefix): value
        for name, value in engine("metrics").items()
        if name.startswith(prefix)
    }


def test_second_engine_gets_hits_and_answers_the_same(start, model, plain, store_at, connector):
    store_at()
    first = _engine(start, model, connector)
    assert first("generate", prompts=PROMPTS)["tokens"] == plain
    first("settle")
    first.close()

    second = _engine(start, model, connector)
    answer = second("generate", prompts=PROMPTS)
    assert answer["tokens"] == plain
    assert answer["cached"] == [_whole_blocks(prompt) for prompt in PROMPTS]
    hits = second("metrics")["vllm:external_prefix_cache_hits"]
    assert hits == sum(answer["cached"])
    if connector["name"] == "ours":
        counts = _counts(second)
        # One round trip to look a request up, one to load it; lookups are one request each.
        assert counts["load_batches"] == len(PROMPTS)
        assert counts["lookups"] >= len(PROMPTS)
        assert counts["load_blocks"] == hits // BLOCK
        assert "load_failures" not in counts or counts["load_failures"] == 0
    second("settle")
    second.close()
    _nothing_is_held(store_at.url)


def _nothing_is_held(url):
    """No lease keeps any object, no pin is left."""
    with Client(url) as client:
        figures = client.store_stats()
        objects = sum(each.objects for each in figures)
        assert objects > 0
        assert (
            sum(each.soft_pinned + each.hard_pinned_bytes + each.writing for each in figures) == 0
        )
        # Without force nothing is removed that somebody leases.
        assert client.clear() == objects


def test_faults_end_in_right_answers_in_bounded_time(start, model, plain, store_at, connector):
    cluster = store_at()
    engine = _engine(start, model, connector)

    def generate(what, limit_s=60):
        engine("reset")
        began = time.monotonic()
        answer = engine("generate", prompts=PROMPTS)
        assert answer["tokens"] == plain, what
        assert time.monotonic() - began < limit_s, what
        return answer

    generate("the first time")
    engine("settle")
    assert sum(generate("from the store")["cached"]) > 0

    cluster.kill_worker(0)
    generate("just after the worker died, the master still naming its blocks")
    generate("a while after")
    cluster.restart_worker(0)
    until(lambda: _hits_again(generate, engine), 120, "hits after the worker's restart")

    cluster.kill_master()
    generate("without a master")
    cluster.close()
    store_at()
    until(lambda: _hits_again(generate, engine), 120, "hits after the master's restart")
    engine("settle")
    engine.close()


def _hits_again(generate, engine):
    hit = sum(generate("after a restart")["cached"]) > 0
    engine("settle")
    return hit


def test_engine_starts_without_a_store_and_uses_it_when_it_comes(start, model, plain, store_at):
    engine = start(model, **ours(store_at.url, rest_s=0.2))
    for _ in range(2):
        assert engine("generate", prompts=PROMPTS)["tokens"] == plain
        engine("reset")
    store_at()

    def hit():
        answer = engine("generate", prompts=PROMPTS)
        engine("settle")
        engine("reset")
        assert answer["tokens"] == plain
        return sum(answer["cached"])

    until(hit, 120, "hits after the store came")
    engine.close()
    said = [line for line in engine.output if "serving without it" in line]
    # Once on the scheduler's side, once on the worker's.
    assert 1 <= len(said) <= 2, said


def test_layers_saved_as_they_are_computed(start, model, plain, store_at):
    cluster = store_at()
    engine = start(model, **ours(cluster.url, layers_per_object=1))
    assert engine("generate", prompts=PROMPTS)["tokens"] == plain
    engine("settle")
    engine("reset")
    answer = engine("generate", prompts=PROMPTS)
    assert answer["tokens"] == plain
    assert answer["cached"] == [_whole_blocks(prompt) for prompt in PROMPTS]
    engine.close()
    with Client(cluster.url) as client:
        names = [item.key for item in client.list()]
    assert len(names) == 2 * sum(name.endswith("/last") for name in names)


def test_plugin_by_name_in_an_engine_process_with_events(
    start, model, plain, store_at, free_port_for_events
):
    msgspec = pytest.importorskip("msgspec")
    zmq = pytest.importorskip("zmq")
    cluster = store_at()
    settings = ours(cluster.url)
    del settings["transfer"]["kv_connector_module_path"]
    endpoint = f"tcp://127.0.0.1:{free_port_for_events}"
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.subscribe("")
        socket.RCVTIMEO = 200
        engine = start(
            model,
            in_process=False,
            events={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": endpoint.replace("127.0.0.1", "*"),
            },
            **settings,
        )
        assert engine("generate", prompts=PROMPTS)["tokens"] == plain
        wanted = sum(len(prompt) // BLOCK for prompt in PROMPTS)
        seen = {}

        def collected():
            try:
                _, _, payload = socket.recv_multipart()
            except zmq.Again:
                return len(seen) >= wanted
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored" and event["medium"] == "cpu":
                    unit = event["block_size"]
                    for at, each in enumerate(event["block_hashes"]):
                        seen[each] = event["token_ids"][at * unit : (at + 1) * unit]
            return len(seen) >= wanted

        until(collected, 60, "events of all stored blocks")
        assert next(iter(seen.values())) in [prompt[:BLOCK] for prompt in PROMPTS]
        engine("reset")
        answer = engine("generate", prompts=PROMPTS)
        engine.close()
    assert answer["tokens"] == plain
    assert answer["cached"] == [_whole_blocks(prompt) for prompt in PROMPTS]


@pytest.fixture
def free_port_for_events(store_at):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
