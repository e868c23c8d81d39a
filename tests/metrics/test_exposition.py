"""How families are declared, counted and written."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from mooncake_store.metrics import families
from mooncake_store.metrics.exposition import Page, quoted
from mooncake_store.metrics.families import FAMILIES, NAMES_MAX, OTHERS, PARTS, few
from mooncake_store.metrics.of_master import merged
from mooncake_store.metrics.times import BOUNDS_S, RequestTimes
from mooncake_store.wire.metrics import Metrics, Sample, Took

UNITS = {"seconds", "bytes", "total", "info"}
COUNTED = {
    "ready", "shards", "objects", "replicas", "segments", "workers", "requests", "work", "clients",
    "standbys", "refused", "kept", "mounted", "sound", "connections", "fds", "threads",
}  # fmt: skip
"""What a gauge without a unit is a number of, or says."""
GET, SLOW, BAD = range(3)
REGISTRY = [SimpleNamespace(opcode=GET, name="get"), SimpleNamespace(opcode=SLOW, name="slow"),
            SimpleNamespace(opcode=BAD, name="bad")]  # fmt: skip


def test_names_end_in_base_units_and_say_what_only_grows():
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"(mooncake|process)(_[a-z]+)+", name)
        last = name.rpartition("_")[2]
        assert last in UNITS | COUNTED, name
        assert (last == "total") == (family.kind == "counter"), name
        assert family.part in PARTS
        assert "|" not in family.help
        assert family.help.endswith("."), name


def test_the_table_names_a_family_once():
    assert len(FAMILIES) == len(families._TABLE)


def test_what_is_not_declared_is_not_written():
    page = Page("worker")
    with pytest.raises(KeyError):
        page.add("mooncake_objects", 1, "readable")  # a master's
    with pytest.raises(ValueError, match="shorter"):
        page.add("mooncake_worker_connections", 1)
    with pytest.raises(ValueError, match="longer"):
        page.add("mooncake_worker_sound", 1, "very")


def test_values_of_labels_cannot_break_out():
    page = Page("master")
    page.add("mooncake_namespace_objects", 1, 'a"} 1\nup{\\')
    assert r'mooncake_namespace_objects{namespace="a\"} 1\nup{\\"} 1' in page.text().splitlines()
    assert quoted("plain") == '"plain"'


def test_a_histogram_adds_up_and_ends_with_all():
    counts = (3, 0, 2, *[0] * (len(BOUNDS_S) - 3), 1)
    page = Page("master")
    page.add_times("mooncake_request_seconds", Took("get", counts, 0.5), "get")
    lines = [line for line in page.text().splitlines() if line.startswith("mooncake_request_sec")]
    assert lines[0] == 'mooncake_request_seconds_bucket{operation="get",le="1.6e-05"} 3'
    assert lines[2] == 'mooncake_request_seconds_bucket{operation="get",le="6.4e-05"} 5'
    assert lines[-3:] == [
        'mooncake_request_seconds_bucket{operation="get",le="+Inf"} 6',
        'mooncake_request_seconds_sum{operation="get"} 0.5',
        'mooncake_request_seconds_count{operation="get"} 6',
    ]


@pytest.fixture
def clock(monkeypatch):
    """The clock by which requests are timed, as microseconds that a test moves."""
    hand = SimpleNamespace(us=0)
    monkeypatch.setattr("time.perf_counter_ns", lambda: hand.us * 1000)
    return hand


def test_requests_are_counted_by_what_they_took(clock):
    took = RequestTimes(REGISTRY)

    def handle(_, frame):
        clock.us += frame.us
        return b"reply"

    handle = took.timed(handle)
    for us in (0, 15, 16, 31, 32, 40_000_000):
        assert handle(None, SimpleNamespace(opcode=GET, us=us)) == b"reply"
    [told] = took.told()
    assert told.operation == "get"
    assert told.counts[:3] == (2, 2, 1)
    assert told.counts[-1] == sum(told.counts[3:]) == 1
    assert told.seconds == pytest.approx(40.000094)
    assert len(told.counts) == len(BOUNDS_S) + 1


def test_what_waits_is_timed_to_its_end_and_what_fails_is_counted_twice(clock):
    took = RequestTimes(REGISTRY)

    async def later():
        await asyncio.sleep(0)
        clock.us += 100
        return b"late"

    async def fails():
        raise OSError

    def handle(_, frame):
        if frame.opcode == BAD:
            raise ValueError
        return fails() if frame.fails else later()

    async def ask():
        timed = took.timed(handle)
        assert await timed(None, SimpleNamespace(opcode=SLOW, fails=False)) == b"late"
        with pytest.raises(OSError):  # noqa: PT011 - any
            await timed(None, SimpleNamespace(opcode=SLOW, fails=True))
        with pytest.raises(ValueError):  # noqa: PT011 - any
            timed(None, SimpleNamespace(opcode=BAD))

    asyncio.run(ask())
    told = {each.operation: each for each in took.told()}
    assert (sum(told["slow"].counts), told["slow"].failed) == (2, 1)
    assert told["slow"].seconds == pytest.approx(1e-4)
    assert (sum(told["bad"].counts), told["bad"].failed) == (1, 1)


def test_few_names_are_told_and_the_rest_together():
    sums = {f"n{number:03}": 1 for number in range(NAMES_MAX + 10)}
    told = few(sums)
    assert len(told) == NAMES_MAX + 1
    assert told[OTHERS] == 10
    assert few(dict.fromkeys(sums, 5)).keys() == told.keys()
    assert few(told) == told  # as where a shard has done so before
    assert few({"a": 1}) == {"a": 1}


def test_what_shards_tell_is_added_up():
    one = Metrics(
        (Sample("a", 1, ("x",)), Sample("b", 5)),
        (Took("get", (1, 0), 0.5, 1), Took("put", (1,), 1)),
    )
    other = Metrics((Sample("a", 2, ("x",)), Sample("a", 3, ("y",))), (Took("get", (2, 3), 1.0),))
    told = merged([one, other])
    assert {(each.family, each.labels): each.value for each in told.samples} == {
        ("a", ("x",)): 3, ("a", ("y",)): 3, ("b", ()): 5,
    }  # fmt: skip
    assert {each.operation: each for each in told.took} == {
        "get": Took("get", (3, 3), 1.5, 1), "put": Took("put", (1,), 1),
    }  # fmt: skip
