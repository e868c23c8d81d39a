"""What engines tell of their load, what they leave out, and what answers say of their prompts."""

import aiohttp
import pytest

from mooncake_store.errors import RemoteProtocolError
from serving.front.engine_load import EngineWatch, read_load
from serving.front.usage import TAIL_BYTES, UsageTail
from serving.scheduling.placement import LocalCache
from serving.scheduling.routing import EngineLoad, EngineRouter, Usage
from tests.serving.front.conftest import listening
from tests.serving.front.engines import Engine

LABELS = 'engine="0",model_name="m"'
METRICS = f"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{LABELS}}} 3.0
vllm:num_requests_waiting{{{LABELS}}} 5.0
vllm:num_requests_waiting_by_reason{{{LABELS},reason="capacity"}} 4.0
vllm:num_requests_waiting_by_reason{{{LABELS},reason="deferred"}} 1.0
vllm:engine_sleep_state{{{LABELS},sleep_state="awake"}} 1.0
vllm:engine_sleep_state{{{LABELS},sleep_state="discard_all"}} 0.0
vllm:kv_cache_usage_perc{{{LABELS}}} 0.25
vllm:cache_config_info{{block_size="32",engine="0",kv_cache_size_tokens="1000"}} 1.0
vllm:time_to_first_token_seconds_bucket{{{LABELS},le="0.001"}} 0.0
process_resident_memory_bytes 1e9
"""


def of_rank(rank):
    return METRICS.replace('engine="0"', f'engine="{rank}"')


def without(name):
    return "\n".join(line for line in METRICS.splitlines() if not line.startswith(name))


def test_the_load_of_an_engine_and_of_all_its_ranks():
    assert read_load(METRICS) == (EngineLoad(3, 5, 750), [])
    assert read_load(METRICS + of_rank(1))[0] == EngineLoad(6, 10, 1500)
    asleep = METRICS.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
    assert read_load(asleep)[0] == EngineLoad(3, 5, 750, awake=False)


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("vllm:num_requests_running", None),
        ("vllm:num_requests_waiting", None),
        ("vllm:kv_cache_usage_perc", EngineLoad(3, 5)),
        ("vllm:cache_config_info", EngineLoad(3, 5)),
        ("vllm:engine_sleep_state", EngineLoad(3, 5, 750)),
    ],
)
def test_what_is_missing_is_told_by_its_name(name, load):
    found, missing = read_load(without(name))
    assert found == load
    assert name in missing


def test_a_room_that_is_not_told_as_a_number_is_missing():
    found, missing = read_load(METRICS.replace('tokens="1000"', 'tokens="None"'))
    assert found == EngineLoad(3, 5)
    assert missing == ["vllm:cache_config_info{kv_cache_size_tokens}"]


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "many", ""])
def test_figures_that_are_no_counts_are_refused(value):
    with pytest.raises(RemoteProtocolError):
        read_load(METRICS.replace(f"running{{{LABELS}}} 3.0", f"running{{{LABELS}}} {value}"))


@pytest.mark.parametrize(
    ("answer", "unwell", "said"),
    [
        (METRICS, set(), []),
        (None, set(), ["does not tell its load in full", "vllm:num_requests_waiting"]),
        (503, {"a"}, ["answers 503"]),
        ("vllm:num_requests_running{ 1", set(), ["cannot be read"]),
        ("# nothing\n" * 1000, set(), ["more than 5000 bytes"]),
    ],
)
@pytest.mark.asyncio
async def test_answers_of_engines(answer, unwell, said, monkeypatch, caplog):
    monkeypatch.setattr("serving.front.engine_load.METRICS_BYTES_MAX", 5000)
    engine, router = Engine(), EngineRouter(LocalCache())
    engine.metrics = answer
    router.join("a")
    async with listening(engine.application()) as url, aiohttp.ClientSession() as session:
        watch = EngineWatch({"a": url}, router)
        watch.start(session)
        for _ in range(2):
            await watch.ask("a")
        await watch.close()
    assert router.unwell() == unwell
    messages = [record.getMessage() for record in caplog.records if "engine a" in record.message]
    assert len(messages) == bool(said)  # once, however often it is so
    assert all(word in messages[0] for word in said)
    assert watch.loads["a"].get("waiting") == (5 if answer == METRICS else None)


@pytest.mark.asyncio
async def test_an_engine_that_is_away_is_told_of_with_the_reason(caplog):
    router = EngineRouter(LocalCache())
    router.join("a")
    async with aiohttp.ClientSession() as session:
        watch = EngineWatch({"a": "http://127.0.0.1:1"}, router)
        watch.start(session)
        await watch.ask("a")
        await watch.close()
    assert router.unwell() == {"a"}
    assert "127.0.0.1:1" in watch.loads["a"]["silent"]
    assert "others are preferred" in caplog.text


TOLD = b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}'


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (b'data: {"choices": [1]}\n\ndata: ' + TOLD + b"\n\ndata: [DONE]\n\n", Usage(9, 4)),
        (TOLD, Usage(9, 4)),
        (b'data: {"usage": {"prompt_tokens": 9}}\r\n\r\ndata: [DONE]\r\n\r\n', Usage(9)),
        (b'data: {"usage": null}\n\n', None),
        (b'data: {"usage": {"prompt_tokens": -9}}\n\n', None),
        (b'data: {"usage": {"prompt_tokens": "9"}}\n\n', None),
        (b"data: " + b"[" * 10_000 + b'"usage"\n\n', None),
        (b"\x1f\x8b", None),
        (b"", None),
        (b"x" * TAIL_BYTES + b"\n\ndata: " + TOLD + b"\n\n", Usage(9, 4)),
        (TOLD[:-1] + b', "more": "' + b"x" * TAIL_BYTES + b'"}', None),
    ],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_what_an_answer_says_of_its_prompt(answer, usage, pieces):
    tail = UsageTail()
    size = max(1, len(answer) // pieces)
    for at in range(0, len(answer), size):
        tail.take(answer[at : at + size])
    assert tail.read() == usage
